"""The default CPU job by both schedules: samples per second, and the reward at equal time."""

import statistics
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

from algorithms import CONFIG, run_command

from forge.observability.report import Row, read_metrics

SCHEDULES = {"synchronous": 0, "asynchronous": 1}
"""max_policy_age of each."""

EPISODES_PER_STEP = 64  # batch_size 8 times n_samples 8 in CONFIG
WARMUP = 1  # steps that are not timed: the first waits for the first rollouts, and compiles
NEWEST = 5  # steps that the reward at a time is the mean of
TIMEOUT_S = 1800.0


def compare(rounds: int, steps: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Figures and ratios of `rounds` runs of `steps` steps by each schedule, in alternating order."""
    runs: dict[str, list[list[Row]]] = {name: [] for name in SCHEDULES}
    order = list(SCHEDULES)
    for number in range(rounds):
        for name in order:
            rows = run(SCHEDULES[name], steps, seed=number)
            runs[name].append(rows)
            print(f"round {number + 1}/{rounds} {name}: {samples_per_s(rows):.2f} samples/s", flush=True)
        order.reverse()
    pairs = list(zip(runs["synchronous"], runs["asynchronous"], strict=True))
    times = [min(seconds(a)[-1], seconds(b)[-1]) for a, b in pairs]
    figures = {
        name: {
            "samples_per_s": statistics.median(samples_per_s(rows) for rows in of_schedule),
            "reward_at_equal_time": statistics.mean(
                reward_at(rows, time) for rows, time in zip(of_schedule, times, strict=True)
            ),
            "staleness": statistics.mean(row["staleness/mean"] for rows in of_schedule for row in rows),
        }
        for name, of_schedule in runs.items()
    }
    ratio = statistics.median(samples_per_s(b) / samples_per_s(a) for a, b in pairs)
    return {**figures, "equal_time_s": times, "steps": steps}, {"samples_per_s": round(ratio, 3)}


def run(max_policy_age: int, steps: int, seed: int) -> list[Row]:
    """The metrics of one run, a row for each step."""
    options = {"steps": steps, "seed": seed, "max_policy_age": max_policy_age, "evaluation.every": 0}
    with tempfile.TemporaryDirectory(prefix="async") as folder:
        command = [sys.executable, "-m", "apps.grpo.main", "--config", CONFIG, "--output_dir", folder]
        command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
        error = run_command(command, Path(folder) / "run.log", TIMEOUT_S)
        if error is not None:
            print((Path(folder) / "run.log").read_text())
            sys.exit(f"the run with max_policy_age {max_policy_age} failed: {error}")
        [metrics] = Path(folder).glob("*/metrics.jsonl")
        return [row for row in read_metrics(metrics) if row["step"] > 0]


def seconds(rows: list[Row]) -> list[float]:
    """When each step ended."""
    return list(accumulate(row["time/step_s"] for row in rows))


def samples_per_s(rows: list[Row]) -> float:
    """Completions trained on per second, after the warm-up."""
    timed = rows[WARMUP:]
    return EPISODES_PER_STEP * len(timed) / sum(row["time/step_s"] for row in timed)


def reward_at(rows: list[Row], time: float) -> float:
    """Mean reward of the last steps that had ended by then; the very last may have had nothing to grade."""
    ended = [row for row, end in zip(rows, seconds(rows), strict=True) if end <= time]
    return statistics.mean([row["reward/mean"] for row in ended if "reward/mean" in row][-NEWEST:])
