"""What a run reached, from its metrics.jsonl: a picture and a sentence."""

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge.errors import ForgeError
from forge.observability.view import RL_VIEW, View

Row = dict[str, Any]
"""One step: "step", "time" and the metrics by name."""

Evaluated = tuple[str, int, float]
"""Name, step and value."""


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl. ForgeError where it is missing or has a broken line."""
    if not path.is_file():
        raise ForgeError(f"there is no metrics file {path}")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ForgeError(f"{path}, line {number} is not JSON: {error}") from error
    return rows


def summarize(rows: Sequence[Row], view: View = RL_VIEW) -> str:
    """One sentence: the mean of the view's goal over its first and its last values (reward: the first 3 and
    the last 10), its first, last and best evaluation, the number of steps, and the minutes."""
    if not rows:
        return "no step was finished"
    minutes = sum(row.get("time/step_s", 0.0) for row in rows) / 60  # a run that was resumed did not wait
    name, metric = view.goal
    values = [row[metric] for row in rows if metric in row]
    reached = f"no {name} was recorded"
    if values:
        first, last = values[: view.ends[0]], values[-view.ends[1] :]
        reached = (
            f"mean {name} {_mean(first):.3f} (first {len(first)}) to {_mean(last):.3f} (last {len(last)})"
        )
        if view.ends == (1, 1):
            reached = f"{name} {first[0]:.3f} to {last[0]:.3f}"
    evaluated = _evaluated(rows, view)
    if evaluated:
        label, _, first = evaluated[0]
        _, step, best = max(evaluated, key=lambda point: point[2])
        reached += (
            f", evaluation {label} {first:.3f} to {evaluated[-1][2]:.3f} (best {best:.3f} at step {step})"
        )
    return f"{reached} in {rows[-1]['step']} steps, {minutes:.1f} min"


def draw_report(rows: Sequence[Row], image: Path, title: str = "", view: View = RL_VIEW) -> Path:
    """Draws the view's panels over the steps as a PNG; returns its path.

    Faint: each step; bold: the running mean over a tenth of the run, at most 10 steps. Evaluations are drawn
    over the goal. A metric that was not recorded leaves its panel empty, and says so.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    sentence = textwrap.fill(summarize(rows, view), 100)
    figure.suptitle("\n".join(part for part in (title, sentence) if part), fontsize=12)
    for axes, (name, metric, color) in zip(figure.subplots(2, 2).flat, view.panels, strict=True):
        evaluated = _evaluated(rows, view) if metric == view.goal[1] else []
        _draw_panel(axes, rows, name, metric, color, evaluated)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=130)
    return image


def _draw_panel(
    axes: Any, rows: Sequence[Row], name: str, metric: str, color: str, evaluated: Sequence[Evaluated]
) -> None:
    axes.set_title(name, loc="left", fontsize=11, color="#333333")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("step", color="#555555")
    axes.tick_params(colors="#555555", labelsize=9)
    points = [(row["step"], row[metric]) for row in rows if metric in row and math.isfinite(row[metric])]
    if not points:
        axes.text(
            0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color="#999999"
        )
        axes.set(xticks=[], yticks=[])
        return
    steps, values = zip(*points, strict=True)
    window = max(1, min(10, len(values) // 10))
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=1, marker="." if len(values) < 40 else None)
    axes.plot(steps, _running_mean(values, window), color=color, linewidth=2.2)
    if evaluated:
        names, at_steps, reached = zip(*evaluated, strict=True)
        axes.plot(at_steps, reached, color="#b5482a", marker="o", markersize=4, label=f"held out, {names[0]}")
        axes.legend(frameon=False, fontsize=9, labelcolor="#555555")
        values += reached
    axes.margins(x=0.02)
    if min(values) >= 0:
        share_of_one = metric == "reward/mean" and max(values) <= 1
        axes.set_ylim(0, 1.02 if share_of_one else None)


def _evaluated(rows: Sequence[Row], view: View) -> list[Evaluated]:
    """The first of what each evaluation came to."""
    found = [(row["step"], list(view.evaluated(row).items())[:1]) for row in rows]
    return [(name, step, value) for step, first in found for name, value in first]


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    recent = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [_mean(part) for part in recent]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
