"""The default CPU run once by each algorithm: same model, questions, seed and number of steps.

    .venv/bin/python scripts/bench/algorithms.py [--steps N] [--only NAME,NAME] [--write-docs] [KEY=VALUE ...]
Each is a run of its own of `python -m apps.grpo.main`, one after the other, in FOLDER/NAME (--folder);
KEY=VALUE overrides the config of all of them. A run that has finished under the same command is not made
again, so this can be stopped and started at will. Prints a table, draws the curves (FOLDER/algorithms.png)
and ends with one JSON line; --write-docs puts table and curves into docs.
On two CPU cores, idle otherwise, 40 steps take 3 to 5 minutes an algorithm in bfloat16, 13 in float32; two to
three times that where dynamic sampling leaves groups out.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from algorithms_report import Outcome, draw, table, write_docs

ROOT = Path(__file__).parents[2]
CONFIG = "apps/grpo/smollm2_135m.yaml"
GOALS = {"reward_gain": 0.1}
"""Least rise of the mean reward from the first 5 steps to the last 5 of every algorithm."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A run: what is given on the command line beside the config."""

    name: str
    options: tuple[str, ...]
    teacher: str | None = None  # the algorithm whose trained model it learns from


def by_loss(name: str, *options: str) -> Algorithm:
    return Algorithm(name, ("--loss", name, *options))


ALGORITHMS = [
    Algorithm("grpo", ()),
    by_loss("dr_grpo"),
    by_loss("dapo"),
    by_loss("cispo"),
    by_loss("gspo"),
    by_loss("gspo_token"),
    by_loss("sapo"),
    by_loss("rloo"),
    by_loss("reinforce_pp"),
    by_loss("reinforce_pp_baseline"),
    by_loss("ppo"),
    Algorithm("grpo_truncate", ("--loss.correction", "{kind: truncate, cap: 2.0}")),
    Algorithm("rloo_kl_in_reward", ("--loss", "rloo", "--grpo.kl_in", "reward", "--grpo.beta", "0.01")),
    # adapters begin at 0 and are small: they want ten times the learning rate
    Algorithm("grpo_lora", ("--training.lora", "{rank: 16, alpha: 32}", "--training.learning_rate", "2e-4")),
    Algorithm("distillation", ("--loss", "reinforce"), teacher="grpo"),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help=f"some of {','.join(a.name for a in ALGORITHMS)}")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs/algorithms", help="of all runs")
    parser.add_argument("--timeout", type=float, default=45.0, help="minutes that one run may take")
    parser.add_argument("--write-docs", action="store_true", help="table and curves into docs/")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for the config of all runs")
    args = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the run under way ends too
    outcomes: dict[str, Outcome] = {}
    for algorithm in chosen(args.only):
        options = [*args.overrides, *algorithm.options, "--steps", str(args.steps), "--seed", str(args.seed)]
        if algorithm.teacher is not None:
            teacher = outcomes[algorithm.teacher]
            if teacher.folder is None:
                outcomes[algorithm.name] = Outcome(shown(algorithm), error="its teacher's run failed")
                continue
            options += ["--teacher", str(teacher.folder / "model")]
        outcomes[algorithm.name] = run(algorithm, options, args.folder, 60 * args.timeout)
    print(table(outcomes))
    picture = draw(outcomes, args.folder / "algorithms.png")
    if args.write_docs:
        same = ["--steps", str(args.steps), "--seed", str(args.seed), *args.overrides]
        write_docs(outcomes, picture, args.steps, shlex.join(same))
    report(outcomes, args.steps, args.seed)


def chosen(only: str) -> Sequence[Algorithm]:
    """The algorithms by these names (no name: all), and their teachers, in the order of the list."""
    names = {name.strip() for name in only.split(",") if name.strip()}
    known = {algorithm.name: algorithm for algorithm in ALGORITHMS}
    if unknown := sorted(names - known.keys()):
        sys.exit(f"--only knows no {', '.join(unknown)}; there are {', '.join(known)}")
    names |= {teacher for name in names if (teacher := known[name].teacher) is not None}
    return [algorithm for algorithm in ALGORITHMS if not names or algorithm.name in names]


def shown(algorithm: Algorithm) -> str:
    """What one has to type for it."""
    words = [f'"{word}"' if " " in word else word for word in algorithm.options]
    return " ".join(words + (["--teacher MODEL"] if algorithm.teacher else []))


def run(algorithm: Algorithm, options: list[str], folder: Path, timeout_s: float) -> Outcome:
    """One training run, or what an earlier one by the same command has left."""
    output, done = folder / algorithm.name, folder / algorithm.name / "done.json"
    only_training = ("evaluation.every=0", "checkpoint.interval=0")
    command = [
        *("-m", "apps.grpo.main", "--config", CONFIG, *only_training, *options),
        *("--output_dir", str(output)),
    ]
    if done.is_file() and (earlier := json.loads(done.read_text()))["command"] == command:
        print(f"{algorithm.name}: finished earlier, {earlier['folder']}", flush=True)
        return Outcome(shown(algorithm), Path(earlier["folder"]))
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    print(f"{algorithm.name}: {' '.join(options)}", flush=True)
    started = time.monotonic()
    error = run_command([sys.executable, *command], output / "run.log", timeout_s)
    if error is not None:
        print(f"{algorithm.name}: {error}; see {output / 'run.log'}", flush=True)
        return Outcome(shown(algorithm), error=error)
    print(f"{algorithm.name}: done in {(time.monotonic() - started) / 60:.1f} min", flush=True)
    [metrics] = output.glob("*/metrics.jsonl")
    if not any(other.teacher == algorithm.name for other in ALGORITHMS):
        shutil.rmtree(metrics.parent / "model")  # nobody needs it
    done.write_text(json.dumps({"command": command, "folder": str(metrics.parent)}))
    return Outcome(shown(algorithm), metrics.parent)


def run_command(command: list[str], log: Path, timeout_s: float) -> str | None:
    """What went wrong, or None. Neither the command nor a process that it started outlives this."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"not done after {timeout_s / 60:.0f} min"
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # it ends its own processes
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
            with contextlib.suppress(ProcessLookupError):  # nobody is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text().splitlines() or ["no output"]
    told = [line for line in lines if line.startswith("error:")] or lines
    return None if code == 0 else f"exit code {code}: {told[-1]}"


def report(outcomes: dict[str, Outcome], steps: int, seed: int) -> None:
    figures = {name: outcome.figures() for name, outcome in outcomes.items()}
    gains = [None if f is None else f["reward_last"] - f["reward_first"] for f in figures.values()]
    result = {
        "bench": "algorithms",
        "figures": figures,
        "goals": GOALS,
        "met": all(gain is not None and gain >= GOALS["reward_gain"] for gain in gains),
        "note": f"{CONFIG}, {steps} steps, seed {seed}; rewards are means of the first and the last 5 steps",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
