"""The terms that losses are made of: float32 inside; masked positions may hold anything."""

from typing import Literal

import torch
from torch import Tensor

AggType = Literal["fixed_horizon", "token_mean", "sequence_mean"]


def compute_logprobs(logits: Tensor, target_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the targets.

    logits [..., T, V], target_ids [..., T] -> [..., T] float32, natural log.
    """
    logits = logits.float() / temperature if temperature != 1.0 else logits.float()
    chosen = logits.gather(-1, target_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(logits, dim=-1)


def compute_ratio(logprobs: Tensor, generator_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Importance ratio pi(token) / pi_generator(token) per token [..., T]; 1 where masked."""
    return torch.exp(_masked(logprobs, loss_mask) - _masked(generator_logprobs, loss_mask))


def compute_kl(
    logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, kind: Literal["k1", "k2", "k3"] = "k3"
) -> Tensor:
    """Per-token estimate [..., T] of KL(pi || ref) from tokens sampled by pi; 0 where masked.

    With d = log ref - log pi: k1 = -d (unbiased), k2 = d^2 / 2 (low variance, biased), k3 = exp(d) - d - 1
    (unbiased, never negative; GRPO, arXiv 2402.03300, eq. 4).
    """
    d = _masked(ref_logprobs, loss_mask) - _masked(logprobs, loss_mask)
    if kind == "k1":
        return -d
    return d.square() / 2 if kind == "k2" else torch.expm1(d) - d


def compute_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits): [..., V] -> [...] float32."""
    logits = logits.float()
    probabilities = torch.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - (probabilities * logits).sum(-1)


def aggregate(values: Tensor, loss_mask: Tensor, agg_type: AggType, horizon: int | None = None) -> Tensor:
    """Per-token values [N, T] -> one number.

    token_mean: over all unmasked tokens (DAPO, arXiv 2503.14476, eq. 8). sequence_mean: over each
    sequence's tokens, then over the sequences (GRPO, arXiv 2402.03300, eq. 3). fixed_horizon: sums over each
    sequence divided by `horizon` tokens, T when None, then over the sequences (Dr. GRPO, arXiv 2503.20783).
    Sequences without a single unmasked token do not count.
    """
    mask = loss_mask.to(values.dtype)
    sums = _masked(values, loss_mask).sum(-1)
    lengths = mask.sum(-1)
    if agg_type == "token_mean":
        return sums.sum() / lengths.sum().clamp(min=1)
    num_sequences = (lengths > 0).sum().clamp(min=1)
    if agg_type == "sequence_mean":
        return (sums / lengths.clamp(min=1)).sum() / num_sequences
    if agg_type == "fixed_horizon":
        return sums.sum() / (horizon or loss_mask.shape[-1]) / num_sequences
    raise ValueError(f"agg_type must be one of fixed_horizon, token_mean, sequence_mean; got {agg_type!r}")


def _masked(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Zeros where the mask is off: neither the value nor its gradient (NaN included) gets through."""
    return torch.where(loss_mask.bool(), values.float(), 0.0)
