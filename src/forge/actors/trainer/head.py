"""From logits to what losses read, at the tokens that count only."""

import torch
from torch import Tensor

CHUNK_BYTES = 2**21
"""Of float32 logits at a time on the CPU: what a core's cache holds."""


def token_logprobs(logits: Tensor, target_ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets and entropies of softmax(logits / temperature), [M] float32, in nats.

    logits [M, V], target_ids [M]. Both results are differentiable; no [M, V] tensor in float32 is kept.
    """
    return _TokenLogprobs.apply(logits, target_ids, temperature)  # pyright: ignore[reportReturnType]


class _TokenLogprobs(torch.autograd.Function):
    """Row by row chunk, with one softmax forward and one backward, the costly part on a CPU."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx, logits: Tensor, target_ids: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        entropies, normalizers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows in _chunks(logits):
            scaled = logits[rows].float() / temperature
            p = torch.softmax(scaled, dim=-1)
            # the likeliest token has p = exp(its logit - normalizer)
            normalizer = scaled.amax(-1) - p.amax(-1).log()
            logprobs[rows] = scaled.gather(-1, target_ids[rows, None])[:, 0] - normalizer
            entropies[rows] = normalizer - torch.linalg.vecdot(p, scaled)
            normalizers[rows] = normalizer
        ctx.save_for_backward(logits, target_ids, normalizers, entropies)
        ctx.temperature = temperature  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor, None, None]:
        logits, target_ids, normalizers, entropies = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        grad = torch.empty_like(logits)
        for rows in _chunks(logits):
            # d logprob / d logit_j = [j is target] - p_j;  d entropy / d logit_j = -p_j (log p_j + entropy)
            scaled = logits[rows].float() / temperature
            part = torch.softmax(scaled, dim=-1)
            slope = torch.zeros_like(normalizers[rows, None])
            if grad_logprobs is not None:
                slope = slope - grad_logprobs[rows, None]
            if grad_entropies is not None:
                log_p = scaled.sub_(normalizers[rows, None])
                slope = slope - grad_entropies[rows, None] * (log_p + entropies[rows, None])
            part *= slope
            if grad_logprobs is not None:
                part.scatter_add_(-1, target_ids[rows, None], grad_logprobs[rows, None])
            grad[rows] = part.div_(temperature)
        return grad, None, None


def _chunks(logits: Tensor) -> list[slice]:
    on_cpu = logits.device.type == "cpu"
    step = max(1, CHUNK_BYTES // (4 * logits.shape[-1]) if on_cpu else len(logits))
    return [slice(start, start + step) for start in range(0, len(logits), step)]


def spread(values: Tensor, loss_mask: Tensor) -> Tensor:
    """values [M, ...] at the M unmasked places -> [N, T, ...] with zeros elsewhere; differentiable."""
    places = loss_mask.flatten().nonzero().squeeze(1)
    if len(places) == loss_mask.numel():
        return values.view(*loss_mask.shape, *values.shape[1:])
    spread_out = values.new_zeros(loss_mask.numel(), *values.shape[1:])
    return spread_out.index_copy(0, places, values).view(*loss_mask.shape, *values.shape[1:])
