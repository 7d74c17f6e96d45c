"""Log-probabilities without full logits against full logits and log_softmax: peak memory and time.

    .venv/bin/python scripts/bench/losses.py [--quick] [--device cuda] [--threads 2]
3,072 tokens, a vocabulary of 49,152 and hidden states of 576 numbers (SmolLM2-135M's), forward and backward.
Two sides do the same work, each in a process of its own, by turns:
`chunked` is forge.rl.loss.logprobs, `full` the rival: `torch.log_softmax(logits.float(), -1)`, `gather`, and
where the entropy is wanted `-(p * log p).sum(-1)`.
Work is named by what is given (`hidden`: hidden states and the head's weight, with gradients of both;
`logits`: logits that are there already), dtype, and what is wanted (`logprobs`, or `both`: log-probabilities
and entropies, with gradients through either).
Peak memory is what comes on top of the inputs, gradients included: the process's high-water mark on the CPU,
the allocator's on cuda. Sides must agree in values and gradients: of each, 512 rows are multiplied by a
vector drawn by chance, and the largest difference is told as a share of the largest product.
Prints what it does and ends with one JSON line.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.actors.memory import keep_freed_memory
from forge.rl.loss.logprobs import compute_logprobs, compute_logprobs_and_entropy

ROOT = Path(__file__).parents[2]
SIDES = ("chunked", "full")
GOALS = {"memory": 0.2, "time": 1.0}  # chunked / full from hidden states, at most
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # between the sides' values and gradients, relative
Figures = dict[str, Any]
Step = Callable[[], list[Tensor]]  # -> values and gradients


def main() -> None:
    args = arguments()
    if args.side:
        print(json.dumps(measure(args.side, args)))
        return
    figures: Figures = {}
    for given in ("hidden", "logits"):
        for dtype in args.dtype:
            for wanted in ("logprobs", "both"):
                figures[f"{given}/{dtype}/{wanted}"] = compare(given, dtype, wanted, args)
    report(figures, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens, one step")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", nargs="+", choices=tuple(TOLERANCE), default=list(TOLERANCE))
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--rounds", type=int, default=3, help="times that each side's process is started")
    parser.add_argument("--steps", type=int, default=3, help="measured in each, after one that is not")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    for name in ("side", "given", "wanted"):  # of the processes that this one starts
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.rounds, args.steps = 384, 1, 1
    return args


def compare(given: str, dtype: str, wanted: str, args: argparse.Namespace) -> Figures:
    """Both sides' medians and their ratios."""
    runs: dict[str, list[Figures]] = {side: [] for side in SIDES}
    for n in range(args.rounds):
        for side in SIDES if n % 2 == 0 else reversed(SIDES):
            runs[side].append(run_side(side, given, dtype, wanted, args))
    table: Figures = {
        side: {
            "seconds": statistics.median(s for run in results for s in run["seconds"]),
            "cpu_seconds": statistics.median(s for run in results for s in run["cpu_seconds"]),
            "peak_mb": statistics.median(run["peak_mb"] for run in results),
        }
        for side, results in runs.items()
    }
    chunked, full = table["chunked"], table["full"]
    pairs = zip(runs["chunked"], runs["full"], strict=True)  # neighbours in time
    table["time"] = statistics.median(
        statistics.median(mine["seconds"]) / statistics.median(theirs["seconds"]) for mine, theirs in pairs
    )
    table["cpu_time"] = chunked["cpu_seconds"] / full["cpu_seconds"]
    table["memory"] = chunked["peak_mb"] / full["peak_mb"]
    table["difference"] = difference(runs["chunked"][0]["probes"], runs["full"][0]["probes"])
    print(
        f"{given}/{dtype}/{wanted}: {chunked['seconds']:.2f} s and {chunked['peak_mb']:.0f} MB against "
        f"{full['seconds']:.2f} s and {full['peak_mb']:.0f} MB: time x {table['time']:.2f}, memory x "
        f"{table['memory']:.3f}",
        flush=True,
    )
    return table


def difference(mine: list[list[float]], theirs: list[list[float]]) -> float:
    """The largest of any tensor, as a share of the largest number of theirs; NaN where either has one."""
    shares = [
        (torch.tensor(a) - torch.tensor(b)).abs().max() / torch.tensor(b).abs().max()
        for a, b in zip(mine, theirs, strict=True)
    ]
    return torch.stack(shares).max().item()


def run_side(side: str, given: str, dtype: str, wanted: str, args: argparse.Namespace) -> Figures:
    """One process; the last line that it prints is its result."""
    told = {"side": side, "given": given, "dtype": dtype, "wanted": wanted, "device": args.device}
    told |= {"tokens": args.tokens, "vocabulary": args.vocabulary, "hidden": args.hidden}
    told |= {"steps": args.steps, "threads": args.threads}
    done = subprocess.run(
        [
            sys.executable,
            __file__,
            *(str(word) for name, value in told.items() for word in (f"--{name}", value)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": str(args.threads)},
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    if done.returncode != 0:
        sys.exit(f"{side} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(side: str, args: argparse.Namespace) -> Figures:
    """The first step is for the peak, with memory that no step has touched before; it is not timed."""
    torch.set_num_threads(args.threads)
    small = argparse.Namespace(**{**vars(args), "tokens": 8, "vocabulary": 64})
    step_of(side, small)()  # what is loaded at first use is not memory of the work
    step = step_of(side, args)
    ctypes.CDLL(None).malloc_trim(0)  # of what making the inputs took
    keep_freed_memory()
    start = held_mb(args.device, at_peak=False)
    results = step()
    peak = held_mb(args.device, at_peak=True) - start
    probes = [probe(result) for result in results]
    del results
    seconds, cpu_seconds = [], []
    for _ in range(args.steps):
        began, cpu_began = time.perf_counter(), time.process_time()
        step()
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": peak, "probes": probes}


def probe(result: Tensor) -> list[float]:
    """Of at most 512 rows of [R] or [R, C], the same on both sides: each times one random vector [C]. All
    columns of a row have their part in it; a norm of the whole would hide wrong rows and signs."""
    chance = torch.Generator().manual_seed(1)
    rows = torch.randperm(len(result), generator=chance)[:512]
    chosen = result.reshape(len(result), -1)[rows.to(result.device)].double().cpu()
    return (chosen @ torch.randn(chosen.shape[1], generator=chance, dtype=torch.float64)).tolist()


def step_of(side: str, args: argparse.Namespace) -> Step:
    """Forward and backward over inputs that are there."""
    torch.manual_seed(0)
    [dtype_name] = args.dtype
    dtype, device = getattr(torch, dtype_name), args.device
    hidden = torch.randn(args.tokens, args.hidden).to(device, dtype)
    weight = (torch.randn(args.vocabulary, args.hidden) * 0.1).to(device, dtype)
    target_ids = torch.randint(args.vocabulary, (args.tokens,), device=device)
    factors = torch.randn(2, args.tokens, device=device)
    if args.given == "logits":
        inputs = [hidden @ weight.T]
        del hidden, weight
    else:
        inputs = [hidden, weight]
    for tensor in inputs:
        tensor.requires_grad_()

    def step() -> list[Tensor]:
        scores = (chunked if side == "chunked" else full)(inputs, target_ids, args.wanted)
        total = torch.stack([(f * s).sum() for f, s in zip(factors, scores, strict=False)]).sum()
        return [*(s.detach() for s in scores), *torch.autograd.grad(total, inputs)]

    return step


def chunked(inputs: list[Tensor], target_ids: Tensor, wanted: str) -> list[Tensor]:
    head = inputs[1] if len(inputs) == 2 else None
    if wanted == "logprobs":
        return [compute_logprobs(inputs[0], target_ids, head=head)]
    return [*compute_logprobs_and_entropy(inputs[0], target_ids, head=head)]


def full(inputs: list[Tensor], target_ids: Tensor, wanted: str) -> list[Tensor]:
    logits = inputs[0] @ inputs[1].T if len(inputs) == 2 else inputs[0]
    log_p = torch.log_softmax(logits.float(), -1)
    del logits
    logprobs = log_p.gather(-1, target_ids[:, None])[:, 0]
    return [logprobs] if wanted == "logprobs" else [logprobs, -(log_p.exp() * log_p).sum(-1)]


def held_mb(device: str, *, at_peak: bool) -> float:
    """Memory now or, at_peak, the most since it was asked for now."""
    if device == "cuda":
        if not at_peak:
            torch.cuda.reset_peak_memory_stats()
        return (torch.cuda.max_memory_allocated() if at_peak else torch.cuda.memory_allocated()) / 1e6
    if not at_peak:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark becomes what is held now
    status = Path("/proc/self/status").read_text().splitlines()
    line = "VmHWM" if at_peak else "VmRSS"
    return next(int(row.split()[1]) for row in status if row.startswith(line)) / 1e3


def report(figures: Figures, args: argparse.Namespace) -> None:
    goals = {
        f"{name}/{what}": most
        for name in figures
        if name.startswith("hidden/")
        for what, most in GOALS.items()
    }
    agree = all(table["difference"] <= TOLERANCE[name.split("/")[1]] for name, table in figures.items())
    met = agree and all(
        figures[goal.rpartition("/")[0]][goal.rpartition("/")[2]] <= m for goal, m in goals.items()
    )
    result = {
        "bench": "losses",
        "figures": figures,
        "goals": goals,
        "agree": agree,
        "met": None if args.quick else met,
        "note": f"chunked / full, below 1: chunked is better; {args.tokens} tokens x {args.vocabulary} "
        f"words, hidden {args.hidden}, {args.device}, {args.threads} threads; medians of {args.rounds} "
        "rounds, time of neighbouring processes",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
