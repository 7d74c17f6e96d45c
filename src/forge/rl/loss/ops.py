"""The terms that losses are made of: float32 inside; masked positions may hold anything."""

from typing import Literal

import torch
from torch import Tensor

from forge.rl.loss.logprobs import compute_entropy, compute_logprobs, compute_logprobs_and_entropy

__all__ = [
    "MAX_LOG_RATIO",
    "AggType",
    "KLKind",
    "aggregate",
    "clipped_surrogate",
    "compute_entropy",
    "compute_kl",
    "compute_logprobs",
    "compute_logprobs_and_entropy",
    "compute_ratio",
    "masked",
    "per_token",
]

AggType = Literal["fixed_horizon", "token_mean", "sequence_mean"]
KLKind = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""In nats. Ratios of probabilities end at exp(20), 5e8, and have no gradient beyond: it would be one token's
alone, and float32 overflows soon after, to infinities that times 0 are NaN."""


def compute_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    level: Literal["token", "sequence"] = "token",
) -> Tensor:
    """Importance ratio pi / pi_old [..., T] -> per token [..., T], 1 where masked; or per sequence [..., 1]:
    the geometric mean over its unmasked tokens (GSPO, arXiv 2507.18071, eq. 7), 1 where it has none. At most
    exp(MAX_LOG_RATIO)."""
    log_ratio = masked(logprobs, loss_mask) - masked(old_logprobs, loss_mask)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / loss_mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), to maximise (PPO, arXiv 1707.06347, eq. 7), [N, T];
    and where the ratio was outside of its bounds."""
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages), clipped != ratio


def compute_kl(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, kind: KLKind = "k3") -> Tensor:
    """Per-token estimate [..., T] of KL(pi || ref) from tokens sampled by pi; 0 where masked.

    With d = log ref - log pi: k1 = -d (unbiased), k2 = d^2 / 2 (low variance, biased), k3 = exp(d) - d - 1
    (unbiased, never negative; GRPO, arXiv 2402.03300, eq. 4).
    """
    d = masked(ref_logprobs, loss_mask) - masked(logprobs, loss_mask)
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    d = d.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(d) - d


def aggregate(
    values: Tensor,
    loss_mask: Tensor,
    agg_type: AggType,
    horizon: int | None = None,
    *,
    num_tokens: int | Tensor | None = None,
    num_sequences: int | Tensor | None = None,
) -> Tensor:
    """Per-token values [N, T] -> one number.

    token_mean: over all unmasked tokens (DAPO, arXiv 2503.14476, eq. 8). sequence_mean: over each
    sequence's tokens, then over the sequences (GRPO, arXiv 2402.03300, eq. 3). fixed_horizon: sums over each
    sequence divided by `horizon` tokens, T when None, then over the sequences (Dr. GRPO, arXiv 2503.20783).
    Sequences without a single unmasked token do not count.

    num_tokens, num_sequences: unmasked tokens, or sequences that count, of the whole batch that these values
    are a part of; its parts then add up to the value of the whole (fixed_horizon: when `horizon` is given).
    """
    sums, lengths = masked(values, loss_mask).sum(-1), loss_mask.bool().sum(-1)
    if agg_type == "token_mean":
        return sums.sum() / (lengths.sum().clamp(min=1) if num_tokens is None else num_tokens)
    count = (lengths > 0).sum().clamp(min=1) if num_sequences is None else num_sequences
    if agg_type == "sequence_mean":
        return (sums / lengths.clamp(min=1)).sum() / count
    if agg_type == "fixed_horizon":
        return sums.sum() / (horizon or loss_mask.shape[-1]) / count
    raise ValueError(f"agg_type must be one of fixed_horizon, token_mean, sequence_mean; got {agg_type!r}")


def masked(values: Tensor, loss_mask: Tensor) -> Tensor:
    """float32, and zeros where the mask is off: neither the value nor its gradient (NaN included) gets
    through."""
    return torch.where(loss_mask.bool(), values.float(), 0.0)


def per_token(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """Advantages [N], one per sequence, or [N, T] -> [N, T], the shape of logprobs."""
    return (advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages).expand_as(logprobs)
