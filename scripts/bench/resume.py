"""A deterministic GRPO run, left alone twice, and killed again and again: all three must be equal to the bit.

    .venv/bin/python scripts/bench/resume.py [--quick] [--steps 20] [--kills 5] [--model M] [KEY=VALUE ...]
Synchronous (`max_policy_age: 0`), float32, `generator.deterministic`, on a CPU. The third run is killed by
SIGKILL to its whole process group at random moments, also while it starts, and resumed each time. Then the
rows of metrics (losses, gradients, rewards, evaluations) and the weights of the exported models are compared.
The model is SmolLM2-135M-Instruct, or whatever --model names. Prints what it does, ends with one JSON line.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMPARED = ("loss/", "trainer/", "reward/mean", "evaluation/", "staleness/")
"""Of a row: the rest is time."""

STARTING_S = 25.0
"""A run of a small model takes about as long to start: kills may come within."""

NOTE = "differences: steps whose metrics differ, and the weights; kills: those that hit the run"


def command(out: Path, *overrides: str) -> list[str]:
    """A synchronous run that computes the same to the bit whenever it is run."""
    return [
        *(sys.executable, "-m", "apps.grpo.main", f"output_dir={out}", "max_policy_age=0"),
        *("training.dtype=float32", "generator.deterministic=true", "checkpoint.interval=1", *overrides),
    ]


def run(arguments: Sequence[str]) -> None:
    """To its end."""
    subprocess.run(arguments, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def run_until_killed(
    arguments: Sequence[str], *, after_rows: int, delay_s: float, how: signal.Signals = signal.SIGKILL
) -> int:
    """The signal to the whole group, `delay_s` after so many new rows (0: after the start); the exit code,
    which is 0 when the run was done before."""
    with subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        rows = 0
        while rows < after_rows and (line := process.stdout.readline()):
            rows += line.startswith("step ")
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(delay_s)
        os.killpg(process.pid, how)
        return process.wait()


def resumed(out: Path, *overrides: str) -> list[str]:
    """The same run, from where it was; one that was killed before it had a folder begins."""
    return command(out, *overrides, *(["--resume"] if any(out.glob("*/config.yaml")) else []))


def run_killed(out: Path, overrides: Sequence[str], *, steps: int, kills: int, seed: int) -> int:
    """Kills and resumes a run so often, then lets it end; returns the kills that hit it."""
    moments = random.Random(seed)
    hit = 0
    for _ in range(kills):
        after_rows = moments.randint(0, steps // (kills + 1))  # the last one comes before the end
        delay_s = moments.uniform(0, STARTING_S if after_rows == 0 else 1.0)
        print(f"  a kill {delay_s:.2f} s after {after_rows} rows", flush=True)
        if run_until_killed(resumed(out, *overrides), after_rows=after_rows, delay_s=delay_s) == 0:
            break
        hit += 1
    run(resumed(out, *overrides))
    return hit


def outcome(out: Path) -> dict[str, Any]:
    """What is compared of the one run in this folder: its rows by step, a hash of its weights."""
    [config] = out.glob("*/config.yaml")  # killed before it wrote that, a run had not begun
    folder = config.parent
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if k == "step" or k.startswith(COMPARED)} for row in rows]
    weights = sorted((folder / "model").glob("*.safetensors"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in weights))
    return {"rows": kept, "weights": digest.hexdigest()}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Which steps' metrics differ, and whether the weights do."""
    told = [
        f"step {a['step']}: {sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))}"
        for a, b in zip(one["rows"], other["rows"], strict=False)
        if a != b
    ]
    if len(one["rows"]) != len(other["rows"]):
        told.append(f"{len(one['rows'])} and {len(other['rows'])} rows")
    return told + (["the weights"] if one["weights"] != other["weights"] else [])


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """Those of the bench, and those of its runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="6 steps and 2 kills")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--model", default=None)
    options, overrides = parser.parse_known_args()
    options.steps = options.steps or (6 if options.quick else 20)
    options.kills = options.kills or (2 if options.quick else 5)
    model = [f"model={options.model}"] if options.model else []
    return options, [f"steps={options.steps}", *model, *overrides]


def main() -> None:
    options, overrides = arguments()
    seconds, hit = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second", "killed"):
            print(f"the {name} run", flush=True)
            start, out = time.monotonic(), Path(folder, name)
            if name == "killed":
                hit = run_killed(out, overrides, steps=options.steps, kills=options.kills, seed=options.seed)
            else:
                run(command(out, *overrides))
            seconds[name] = round(time.monotonic() - start, 1)
        first, second, killed = (outcome(Path(folder, name)) for name in seconds)
    again, after_kills = differences(first, second), differences(first, killed)
    for told in (*again, *after_kills):
        print(f"DIFFERS: {told}")
    ratios = {
        "differences_when_repeated": len(again),
        "differences_when_killed": len(after_kills),
        "kills": hit,
    }
    goals = {"differences_when_repeated": 0, "differences_when_killed": 0, "kills": options.kills}
    figures = {
        "steps": options.steps,
        "seconds": seconds,
        "differences": {"repeated": again, "killed": after_kills},
    }
    result = {"bench": "resume", "figures": figures, "ratios": ratios, "goals": goals}
    print(json.dumps({**result, "met": ratios == goals, "note": NOTE}))


if __name__ == "__main__":
    main()
