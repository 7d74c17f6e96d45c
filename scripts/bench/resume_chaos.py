"""A GRPO run whose processes are killed all the time, and which is killed as a whole and resumed: against the
same run left alone, is its reward the same, and is every episode trained on once?

    .venv/bin/python scripts/bench/resume_chaos.py [--steps 60] [--kills 2] [--quick] [KEY=VALUE ...]
The asynchronous default run (SmolLM2-135M-Instruct, CPU), seeds 0 and 1 undisturbed, then seed 0 with
`chaos.kill=all` and SIGKILL to the whole process group, each time resumed. Episodes are counted by their ids
in the record of the run (`--record`): question numbers have no gap, so one that was lost shows. Prints what
it does and ends with one JSON line.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the other bench

from resume import ROOT, run_until_killed

from forge.rl.record import FOLDER, read

GOALS = {"episodes_lost": 0, "episodes_trained_twice": 0, "reward_gap_over_seed_noise": 2.0}
LAST = 10
"""Steps that the reward at the end is the mean of."""


def command(out: Path, *overrides: str) -> list[str]:
    """A run that keeps a record, and goes on with the one in this folder if there is one."""
    resume = ["--resume"] if any(out.glob("*/config.yaml")) else []
    own = ("--record", "checkpoint.interval=5", f"output_dir={out}")
    return [sys.executable, "-m", "apps.grpo.main", *own, *resume, *overrides]


def run(arguments: Sequence[str]) -> None:
    """To its end; what it says of chaos is said here, too."""
    done = subprocess.run(arguments, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    print(
        "".join(line for line in done.stdout.splitlines(keepends=True) if "chaos" in line), end="", flush=True
    )


def run_disturbed(out: Path, overrides: Sequence[str], every_s: float, kills: int, steps: int) -> None:
    """Its processes are killed one by one, and now and then all at once."""
    chaos = ("chaos.kill=all", f"chaos.every_s={every_s}")
    moments = random.Random(0)
    for i in range(kills):
        rows = moments.randint(steps // (kills + 1) // 2, steps // (kills + 1))
        delay_s = moments.uniform(0, 3)
        print(f"  kill {i + 1} of all its processes, {delay_s:.1f} s after {rows} steps", flush=True)
        if not run_until_killed(command(out, *overrides, *chaos), after_rows=rows, delay_s=delay_s):
            raise SystemExit("the run ended before it could be killed: more steps, or fewer kills")
    run(command(out, *overrides, *chaos))


def outcome(out: Path) -> dict[str, Any]:
    """The reward at the end and on held-out questions, and what became of each question and episode."""
    [folder] = out.iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards, scores = values(rows, "reward/mean"), values(rows, "evaluation/avg@4")
    trained = Counter(e.episode_id for recorded in read(folder / FOLDER) for e in recorded.episodes)
    newest = max((folder / "checkpoints" / "loop").glob("step-*.pt"), key=lambda f: f.stat().st_mtime)
    buffer = torch.load(newest, weights_only=False)["buffer"]
    numbers = {int(id.partition("/")[0]) for id in trained}
    left = {number for number, *_ in buffer["running"]}
    left |= {int(e.group_id) for group in buffer["waiting"] for e in group["episodes"]}
    lost = set(range(buffer["next_number"])) - numbers - left
    return {
        "steps": len([row for row in rows if row["step"] > 0]),
        "first_reward": round(statistics.mean(rewards[:LAST]), 3),
        "last_reward": round(statistics.mean(rewards[-LAST:]), 3),
        "evaluation": scores[-1] if scores else None,
        "episodes_trained": len(trained),
        "episodes_trained_twice": sum(times > 1 for times in trained.values()),
        "episodes_lost": len(lost) - buffer["counts"]["num_restarted"],
    }


def values(rows: Sequence[dict[str, float]], metric: str) -> list[float]:
    """Of the rows that have it."""
    return [row[metric] for row in rows if metric in row]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=2, help="of all processes at once")
    parser.add_argument("--every-s", type=float, default=40.0, help="between two kills of one process")
    parser.add_argument("--quick", action="store_true", help="few steps: counts, but rewards say little")
    options, overrides = parser.parse_known_args()
    steps = 12 if options.quick else options.steps
    overrides = [f"steps={steps}", *overrides]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = {}
        for seed in (0, 1):
            print(f"undisturbed, seed {seed}", flush=True)
            run(command(Path(folder, f"seed{seed}"), *overrides, f"seed={seed}"))
            outcomes[f"seed{seed}"] = outcome(Path(folder, f"seed{seed}"))
            print(f"  {outcomes[f'seed{seed}']}", flush=True)
        print("disturbed, seed 0", flush=True)
        run_disturbed(Path(folder, "chaos"), overrides, options.every_s, options.kills, steps)
        outcomes["disturbed"] = disturbed = outcome(Path(folder, "chaos"))
        print(f"  {disturbed}", flush=True)
    last = {name: each["last_reward"] for name, each in outcomes.items()}
    noise = max(abs(last["seed0"] - last["seed1"]), 0.05)  # of a mean over ten steps of eight questions
    gap = abs(last["disturbed"] - statistics.mean([last["seed0"], last["seed1"]]))
    reached = {
        "episodes_lost": disturbed["episodes_lost"],
        "episodes_trained_twice": disturbed["episodes_trained_twice"],
        "reward_gap_over_seed_noise": round(gap / noise, 2),
    }
    result = {
        "bench": "resume_chaos",
        "figures": outcomes,
        "ratios": reached,
        "goals": GOALS,
        "met": disturbed["steps"] == steps and all(reached[name] <= goal for name, goal in GOALS.items()),
        "note": f"{options.kills} kills of all processes, one of a single one every {options.every_s:g} s on "
        f"average; rewards are means over {LAST} steps; seed noise: the two seeds' gap, or 0.05",
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
