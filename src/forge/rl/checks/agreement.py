"""Agreement: what different programs, or different passes of one, must compute alike up to rounding."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forge.actors.trainer.micro_batch import part_of
from forge.controller import ActorHandle
from forge.data_models import TrainInputs, TrainTargets
from forge.rl.checks.finding import Finding, name_all
from forge.rl.loss.ops import compute_kl

MIN_TOKENS = 8
"""Fewer tokens of an episode are averaged as if they were so many: a single one may be off by far more."""

ROWS = 4
"""Of every rank's batch, whose gradient is computed twice: prompts, each with its completions."""


def check_ratio(
    targets: Sequence[TrainTargets], logprobs: Sequence[Tensor], version: int, limit: float
) -> Finding | None:
    """The trainer's log-probabilities under a version, [N, T] of each rank, against those that the tokens of
    that version were sampled with. Episodes of others are not looked at."""
    gaps = [
        (own - t.generator_logprobs).abs() * is_of(t, version)[:, None]
        for t, own in zip(targets, logprobs, strict=True)
    ]
    found = _worst(targets, gaps, limit)
    if found is None:
        return None
    names, value = found
    return Finding(
        "ratio",
        names,
        f"trainer and generator with the same weights differ by less than {limit:g} nats a token "
        "(checks.max_logprob_gap)",
        f"they differ by {value:.3g} on average over episode {names[0]} ({len(names)} are above)",
        "see that both have one model, dtype and temperature, and that no processor of logits changes what "
        "is sampled; `forge replay` shows the numbers of every token",
    )


def is_of(targets: TrainTargets, version: int) -> Tensor:
    """[N]: which completions a version sampled, all of their tokens (none of them is older)."""
    versions = targets.policy_versions or [None] * len(targets.target_ids)  # nobody said
    return torch.tensor([v == version for v in versions], dtype=torch.bool)


def check_reference(
    targets: Sequence[TrainTargets], logprobs: Sequence[Tensor], limit: float
) -> Finding | None:
    """The KL towards the reference of a policy that has not been trained yet."""
    kls = [
        torch.zeros_like(own)
        if t.ref_logprobs is None
        else compute_kl(own, t.ref_logprobs, t.loss_mask, "k3")
        for t, own in zip(targets, logprobs, strict=True)
    ]
    found = _worst(targets, kls, limit)
    if found is None:
        return None
    names, value = found
    return Finding(
        "reference_kl",
        names,
        f"the KL of the untrained policy to the reference is less than {limit:g} nats a token "
        "(checks.max_reference_kl)",
        f"it is {value:.3g} over episode {names[0]} ({len(names)} are above)",
        "see that services.ref_model has the model, dtype and temperature of the trainer",
    )


def _worst(
    targets: Sequence[TrainTargets], values: Sequence[Tensor], limit: float
) -> tuple[tuple[str, ...], float] | None:
    """The episodes whose mean of the values [N, T] over their tokens is not within the limit, the worst
    first, and its mean."""
    means: list[tuple[float, str]] = []
    for t, of_rank in zip(targets, values, strict=True):
        mask = t.loss_mask.bool()
        mean = torch.where(mask, of_rank, 0.0).sum(-1) / mask.sum(-1).clamp(min=MIN_TOKENS)
        means += zip(mean.nan_to_num(nan=torch.inf).tolist(), t.episode_ids, strict=True)
    worst = sorted((m for m in means if m[0] > limit), key=lambda m: -m[0])
    return (tuple(name for _, name in worst), worst[0][0]) if worst else None


async def check_gradient(
    trainer: ActorHandle, inputs: Sequence[TrainInputs], targets: Sequence[TrainTargets], limit: float
) -> Finding | None:
    """The norm of a gradient, computed in the trainer's micro-batches and in passes of one row each.

    Advantages are other ones, so that there is a gradient where all rewards are equal.
    """
    parts = [
        part_of((i, _with_advantages(t)), range(min(ROWS, len(i.input_ids))))
        for i, t in zip(inputs, targets, strict=True)
    ]
    whole, by_row = await trainer.gradient_norms.route([i for i, _ in parts], [t for _, t in parts])
    error = abs(whole - by_row) / max(whole, by_row, 1e-12)
    if error <= limit:  # NaN is not
        return None
    names = tuple(episode for _, t in parts for episode in t.episode_ids)
    return Finding(
        "gradient_scale",
        names,
        f"micro-batches change the norm of a gradient by less than {limit:.1%} (checks.max_gradient_error)",
        f"that of {name_all(names)} is {whole:.6g} in passes as training has them, {by_row:.6g} row by row",
        "see that the loss averages over what its `normalize_by` says, and that nothing in it looks at the "
        "whole micro-batch",
    )


def _with_advantages(targets: TrainTargets) -> TrainTargets:
    """1, 2, 3, 1, 2, 3, ...: none cancels another, and what is weighed wrongly shows."""
    new = 1.0 + torch.arange(len(targets.target_ids)) % 3
    if targets.advantages.dim() == 2:
        new = new[:, None] * targets.loss_mask
    return replace(targets, advantages=new.to(targets.advantages))
