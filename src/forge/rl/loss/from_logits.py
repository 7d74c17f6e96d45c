"""Log-probabilities and entropies from logits that are there already, some tokens at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from forge.rl.loss.softmax import FLOOR, exp, logit_slopes

CPU_CHUNK = 2**18
"""Logits that are worked on at a time: 1 MiB of float32, which a core's cache holds."""
GPU_CHUNK = 2**24
"""The same for GPUs: large enough to keep one busy."""


def scores_of_logits(
    logits: Tensor, target_ids: Tensor, temperature: float = 1.0, loss_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [..., T, V], target_ids and loss_mask [..., T] -> log-probabilities of the targets and entropies
    of softmax(logits / temperature), [..., T] float32 each, in nats and differentiable; 0 where masked.

    Of the size of the logits only their gradient is made, in their dtype. Logits may be -inf.
    """
    if logits.is_contiguous() or logits.dim() < 3:
        flat = logits.view(-1, logits.shape[-1])
    else:  # as of logits[:, :-1], which no view makes one matrix
        flat = logits.flatten(0, -3)
    ids = target_ids.reshape(flat.shape[:-1])
    mask = None if loss_mask is None else loss_mask.bool().reshape(ids.shape)
    with torch.autocast(logits.device.type, enabled=False):
        logprobs, entropies = ScoresOfLogits.apply(flat, ids, temperature, mask)  # type: ignore[misc]
    return logprobs.view(target_ids.shape), entropies.view(target_ids.shape)


class ScoresOfLogits(torch.autograd.Function):
    """The softmax is computed once more backward, from the normalizers: logits are saved, which others hold
    anyway, and nothing beside them."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx,
        logits: Tensor,
        target_ids: Tensor,
        temperature: float,
        loss_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """As `scores_of_logits`, of logits [M, V] or [N, T, V]."""
        logprobs, entropies, normalizers = torch.zeros(3, *target_ids.shape, device=logits.device)
        for places in _chunks(logits, loss_mask):
            chunk = _scaled(logits[places], temperature)
            normalizers[places] = chunk.logsumexp(-1)
            targets = chunk.gather(-1, target_ids[places][:, None])[:, 0]
            logprobs[places] = targets - normalizers[places]
            log_p = chunk.sub_(normalizers[places][:, None])
            entropies[places] = -torch.linalg.vecdot(exp(log_p), log_p.clamp_(min=FLOOR))
        ctx.save_for_backward(logits, target_ids, loss_mask, normalizers, entropies)  # pyright: ignore[reportArgumentType]
        ctx.temperature = temperature  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, target_ids, loss_mask, normalizers, entropies = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        if grad_logprobs is None and grad_entropies is None:
            return None, None, None, None
        make = torch.empty if loss_mask is None else torch.zeros
        grad = make(logits.shape, dtype=logits.dtype, device=logits.device)
        for places in _chunks(logits, loss_mask):
            log_p = _scaled(logits[places], temperature).sub_(normalizers[places][:, None])
            grad[places] = logit_slopes(
                log_p,
                target_ids[places],
                entropies[places],
                None if grad_logprobs is None else grad_logprobs[places] / temperature,
                None if grad_entropies is None else grad_entropies[places] / temperature,
            ).to(grad.dtype)
        return grad, None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A float32 copy over the temperature."""
    return logits.float() / temperature if temperature != 1.0 else logits.to(torch.float32, copy=True)


def _chunks(logits: Tensor, loss_mask: Tensor | None) -> Iterator[tuple[int | slice | Tensor, ...]]:
    """Indices of some unmasked tokens at a time."""
    *lead, num_tokens, num_words = logits.shape
    size = max(1, (CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK) // num_words)
    for row in [(i,) for i in range(lead[0])] if lead else [()]:
        if loss_mask is None:
            yield from ((*row, slice(i, i + size)) for i in range(0, num_tokens, size))
        else:
            yield from ((*row, tokens) for tokens in loss_mask[row].nonzero()[:, 0].split(size))
