"""forge's losses against TRL's, on the same random batches: values, and gradients by the logits.

    .venv/bin/python scripts/bench/losses_vs_trl.py [--seeds N] [--only WORD]
TRL gets an environment of its own (.bench/trl), made on first use, where the code of its trainers computes
advantages, importance ratios, corrections and losses (losses_trl_side.py); losses_trl_cases.py has what is
compared. Batches have completions of all lengths, places in them that are masked, and ratios on both sides
of every clip. Differences are the largest over the seeds: of values in absolute numbers, of gradients as a
share of the largest entry. Where the two are not the same by intent a note says why, and `undone` is the
difference that is left once ours is made as the note says TRL has it. Prints a table and ends with one JSON
line.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from losses_trl_cases import CASES, Case
from losses_trl_ours import GROUP_SIZE, LENGTH, Batch, Result, gradient_of, loss_arguments
from rival_env import ROOT, TRL, trl_python
from torch import Tensor

from forge.rl.loss.registry import make_loss

NUM_GROUPS, VOCAB_SIZE = 4, 32
GOAL = 1e-5
DRIFT = {"off_policy": 0.3, "near": 2e-3, "on_policy": 0.0, "whole": 0.05, "empty": 0.3}
"""Kinds of batches: standard deviation of what the policy's logits differ by from those that sampled."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8, help="batches of each kind")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    args = parser.parse_args()
    cases = [case for case in CASES if args.only.lower() in case.name.lower()]
    if not cases:
        sys.exit(f"no case has {args.only!r} in its name; there are: {'; '.join(c.name for c in CASES)}")
    batches = {kind: [make_batch(kind, seed) for seed in range(args.seeds)] for kind in DRIFT}
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        rival = run_trl(cases, batches, Path(folder))
    rows = [compare(case, batches[case.batch], rival[case.name]) for case in cases]
    report(cases, rows, args.seeds)


def make_batch(kind: str, seed: int) -> Batch:
    """N completions of at most T tokens: logits [N, T, V] of the policy, of the one that the update began
    with (old) and of the reference; log-probabilities [N, T] of these two and of the engine that sampled."""
    random = torch.Generator().manual_seed(seed)
    num, drift = NUM_GROUPS * GROUP_SIZE, DRIFT[kind]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    lengths = torch.randint(2, LENGTH + 1, (num,), generator=random)
    lengths[0] = LENGTH
    mask = torch.arange(LENGTH) < lengths.unsqueeze(-1)
    if kind not in ("whole", "on_policy"):  # TRL's RLOO knows no places in between
        mask[:, 1:-1] &= torch.rand(num, LENGTH - 2, generator=random) < 0.8
    if kind == "empty":
        mask[1] = False
    logits = 2 * normal(num, LENGTH, VOCAB_SIZE)
    old = logits + drift * normal(*logits.shape)
    reference, engine = (old + 0.3 * normal(*logits.shape) for _ in range(2))
    ids = torch.randint(3, VOCAB_SIZE, (num, LENGTH), generator=random)  # after padding, end and unknown
    return {
        "ids": ids,
        "lengths": lengths,
        "loss_mask": mask,
        "logits": logits,
        "old_logits": old,
        "ref_logits": reference,
        "old_logprobs": chosen(old, ids),
        "ref_logprobs": chosen(reference, ids),
        "generator_logprobs": chosen(engine, ids),
        "advantages": normal(num),
        "rewards": torch.rand(num, generator=random),
        "group_size": GROUP_SIZE,
    }


def chosen(logits: Tensor, ids: Tensor) -> Tensor:
    """log softmax at `ids`, by PyTorch alone."""
    return logits.double().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1).float()


def run_trl(
    cases: Sequence[Case], batches: dict[str, list[Batch]], folder: Path
) -> dict[str, list[dict[str, Tensor]]]:
    asked = [{"name": c.name, "side": c.side, "trl": c.trl, "batch": c.batch} for c in cases]
    torch.save({"cases": asked, "batches": batches, "vocab_size": VOCAB_SIZE}, folder / "work.pt")
    command = [str(trl_python()), str(ROOT / "scripts/bench/losses_trl_side.py"), str(folder)]
    print(f"TRL {TRL}: {len(cases)} cases", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"TRL's half ended with exit code {done.returncode}:\n{done.stdout[-3000:]}")
    return torch.load(folder / "trl.pt")


def compare(case: Case, batches: Sequence[Batch], theirs: Sequence[Result]) -> dict[str, Any]:
    """The largest differences over the batches, by what is compared; `undone`: of all of these, after what
    the note tells of."""
    row: dict[str, Any] = dict.fromkeys(case.compare, 0.0)
    for batch, rival in zip(batches, theirs, strict=True):
        ours = case.compute(batch) if case.compute else run_loss(case, batch)
        for name in case.compare:
            row[name] = max(row[name], difference(name, ours[name], rival[name]))
        if case.undo is not None:
            same = case.undo(batch, ours)
            left = max(difference(name, same[name], rival[name]) for name in case.compare)
            row["undone"] = max(row.get("undone", 0.0), left)
    return row


def run_loss(case: Case, batch: Batch) -> Result:
    extra: dict[str, Tensor] = {}
    if "correction" in case.ours:
        extra["proximal_logprobs"] = batch["old_logprobs"]
        batch = {**batch, "old_logprobs": batch["generator_logprobs"]}
    if case.side == "sft":
        batch = {**batch, "advantages": torch.ones_like(batch["advantages"])}  # weights of the targets
    loss = make_loss(case.ours)
    return gradient_of(lambda logits, batch: loss(*loss_arguments(logits, batch), **extra)[0], batch)


def difference(name: str, ours: Tensor, theirs: Tensor) -> float:
    """Infinite where either is not finite or there is no gradient to compare."""
    scale = theirs.abs().max().item() if name == "gradient" else 1.0
    far = (ours - theirs).abs().max().item() / scale if scale else float("inf")
    return far if far == far else float("inf")


def agrees(case: Case, row: dict[str, Any]) -> bool:
    if case.note:
        return row.get("undone", 0.0) <= GOAL
    return all(row[name] <= GOAL for name in case.compare)


def report(cases: Sequence[Case], rows: Sequence[dict[str, Any]], seeds: int) -> None:
    print(f"{'':44}{'value':>10}{'gradient':>10}{'undone':>10}")
    notes: list[str] = []
    for case, row in zip(cases, rows, strict=True):
        shown = (row.get("value", row.get("advantages")), row.get("gradient"), row.get("undone"))
        cells = "".join(f"{'' if x is None else f'{x:.0e}':>10}" for x in shown)
        if case.note:
            notes.append(case.note)
        verdict = f"note {len(notes)}" if case.note else "agrees"
        print(f"{case.name:44}{cells}  {verdict if agrees(case, row) else 'DIFFERS'}")
        print(f"    TRL: {words(case.trl) or 'its defaults'}; ours: {words(case.ours) or 'forge.rl'}")
    for number, note in enumerate(notes, start=1):
        print(f"note {number}: {note}.")
    print("vllm_is stands for vllm_importance_sampling.")
    print("TRL alone has LUSPO, VESPO, GMPO, DFT and DeepSeek-V3.2's mask of sequences.")
    plain = [row for case, row in zip(cases, rows, strict=True) if not case.note]
    result = {
        "bench": "losses_vs_trl",
        "figures": {
            case.name: {k: float(f"{v:.2g}") for k, v in row.items()}
            for case, row in zip(cases, rows, strict=True)
        },
        "worst": max((x for row in plain for x in row.values()), default=0.0),
        "goals": {"difference": GOAL},
        "met": all(agrees(case, row) for case, row in zip(cases, rows, strict=True)),
        "note": f"TRL {TRL}; {seeds} batches of {NUM_GROUPS * GROUP_SIZE} x {LENGTH} tokens, float32; "
        f"{len(notes)} of {len(cases)} differ by intent: {' | '.join(notes)}",
    }
    print(json.dumps(result))


def words(settings: dict[str, Any]) -> str:
    told = {key.replace("vllm_importance_sampling", "vllm_is"): value for key, value in settings.items()}
    return ", ".join(f"{key} {value}" for key, value in told.items() if value is not None)


if __name__ == "__main__":
    main()
