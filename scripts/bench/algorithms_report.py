"""What the runs of algorithms.py came to: figures, a table, curves, and both in docs/algorithms.md."""

import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from forge.observability.report import Row, read_metrics

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- algorithms: begin -->", "<!-- algorithms: end -->"
ENDS = 5  # steps that the first and the last mean are made of


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that finished, or why there is none."""

    shown: str  # its options on the command line
    folder: Path | None = None
    error: str = ""

    def rows(self) -> list[Row]:
        """Its metrics, a row for each step."""
        return [] if self.folder is None else read_metrics(self.folder / "metrics.jsonl")

    def figures(self) -> dict[str, float] | None:
        """None where there is no run. kl and clip_frac are left out where the run has none."""
        rows = self.rows()
        if self.folder is None or not rows:
            return None
        config = yaml.safe_load((self.folder / "config.yaml").read_text())
        group = config["grpo"]["n_samples"]
        trained = config["training"]["batch_size"] * group * sum("trainer/skipped" not in row for row in rows)
        left_out = group * sum(row.get("buffer/num_restarted", 0) for row in rows)
        ends = min(ENDS, max(1, len(rows) // 2))
        figures = {
            "reward_first": mean(rows[:ends], "reward/mean"),
            "reward_last": mean(rows[-ends:], "reward/mean"),
            "seconds_per_step": statistics.median(row["time/step_s"] for row in rows[1:] or rows),
            "samples": float(trained),
            "generated": float(trained + left_out),
            "kl": mean(rows[-ends:], "loss/kl"),
            "clip_frac": mean(rows, "loss/clip_frac"),
        }
        return {name: round(value, 4) for name, value in figures.items() if value is not None}


def mean(rows: Sequence[Row], metric: str) -> float | None:
    """None where no row has the metric."""
    values = [row[metric] for row in rows if metric in row]
    return statistics.fmean(values) if values else None


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Markdown."""
    lines = [
        f"| algorithm | options | reward, first {ENDS} | last {ENDS} | samples | generated | KL | clipped |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, outcome in outcomes.items():
        options, figures = f"`{outcome.shown}`" if outcome.shown else "none", outcome.figures()
        if figures is None:
            lines.append(f"| {name} | {options} | {outcome.error} | | | | | |")
            continue
        cells = [
            f"{figures['reward_first']:.2f}",
            f"{figures['reward_last']:.2f}",
            f"{figures['samples']:.0f}",
            f"{figures['generated']:.0f}",
            f"{figures['kl']:.3f}" if "kl" in figures else "",
            f"{100 * figures['clip_frac']:.1f} %" if "clip_frac" in figures else "",
        ]
        lines.append(f"| {name} | {options} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(outcomes: Mapping[str, Outcome], image: Path) -> Path:
    """The reward over the steps, a panel for each algorithm; behind each, in grey, the first one's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, len(outcomes))
    lines = -(-len(outcomes) // columns)
    figure = Figure(figsize=(2.9 * columns, 2.1 * lines + 0.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle("Mean reward over the steps (faint: each step; bold: mean of 5)", fontsize=11)
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    first = next(iter(outcomes))
    for (name, outcome), axes in zip(outcomes.items(), panels, strict=False):
        draw_panel(axes, name, outcome)
        if name != first and outcomes[first].folder is not None:
            draw_curve(axes, outcomes[first], "#b0b0b0")
            axes.lines[-1].set_label(first)
            axes.legend(loc="lower right", fontsize=8, frameon=False)
    for axes in panels[len(outcomes) :]:  # what is left of the last line
        axes.set_visible(False)
    for axes in panels[max(0, len(outcomes) - columns) : len(outcomes)]:  # the lowest of each column
        axes.tick_params(labelbottom=True)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=130)
    return image


def draw_panel(axes: Any, name: str, outcome: Outcome) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors="#555555", labelsize=8)
    axes.set_ylim(0, 1.02)
    figures = outcome.figures()
    if figures is None:
        axes.set_title(f"{name}: no run", loc="left", fontsize=9, color="#333333")
        return
    reached = f"{figures['reward_first']:.2f} to {figures['reward_last']:.2f}"
    axes.set_title(f"{name}: {reached}", loc="left", fontsize=9, color="#333333")
    axes.plot(*rewards_of(outcome), color="#2a7f62", alpha=0.25, linewidth=1)
    draw_curve(axes, outcome, "#2a7f62", linewidth=2.0)


def draw_curve(axes: Any, outcome: Outcome, color: str, linewidth: float = 1.3) -> None:
    steps, rewards = rewards_of(outcome)
    smooth = [statistics.fmean(rewards[max(0, i + 1 - ENDS) : i + 1]) for i in range(len(rewards))]
    axes.plot(steps, smooth, color=color, linewidth=linewidth, zorder=linewidth)


def rewards_of(outcome: Outcome) -> tuple[list[int], list[float]]:
    """Steps and mean rewards; a step in which nothing was graded has none."""
    graded = [row for row in outcome.rows() if "reward/mean" in row]
    return [row["step"] for row in graded], [row["reward/mean"] for row in graded]


def dtype_of(outcomes: Mapping[str, Outcome]) -> str:
    """What they were trained in."""
    folders = [outcome.folder for outcome in outcomes.values() if outcome.folder is not None]
    dtypes = {yaml.safe_load((folder / "config.yaml").read_text())["training"]["dtype"] for folder in folders}
    return ", ".join(sorted(dtypes))


def write_docs(outcomes: Mapping[str, Outcome], picture: Path, steps: int, options: str) -> None:
    """The table between the markers of docs/algorithms.md, and the picture beside it."""
    page = DOCS / "algorithms.md"
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"{page} must have one line {BEGIN} and one {END}: the table goes between them")
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    lead = (
        f"Made by `scripts/bench/algorithms.py {options}` in {dtype_of(outcomes)}: mean rewards of the first "
        f"and the last {ENDS} of {steps} steps, over all answers that were graded. Samples are what was "
        "trained on; more completions are generated where dynamic sampling leaves out groups whose rewards "
        "are all equal (DAPO, CISPO): at as many steps and samples as the others, these two had more of the "
        f"generator. KL is in nats per token towards the reference (distillation: the teacher) in the last "
        f"{ENDS} steps, clipped the share of tokens whose ratio was:"
    )
    picture_line = "![mean reward over the steps, by algorithm](images/algorithms.png)"
    body = f"{lead}\n\n{table(outcomes)}\n\n{picture_line}"
    page.write_text(f"{head}{BEGIN}\n{body}\n{END}{tail}")
    shutil.copyfile(picture, DOCS / "images/algorithms.png")
