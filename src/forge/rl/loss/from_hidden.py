"""Log-probabilities and entropies from hidden states and the weight of the head: no logits are kept."""

import torch
import torch.distributed as dist
from torch import Tensor

from forge.rl.loss.softmax import columns_of, exp, logit_slopes

CPU_TILE = (1024, 1024)
"""Tokens and words whose logits are computed at a time: 4 MiB of float32, of which caches hold most."""
GPU_TILE = (4096, 4096)
"""The same for GPUs: large enough for products at full speed."""
KEPT_BYTES = 128 * 2**20
"""Logits that are kept for the backward pass, at most; the others are computed once more. Of each pass: the
last stage of a GPipe schedule, which has all its micro-batches before the first backward, keeps as much of
each; under the 1F1B schedules it has one at a time."""


def scores_of_hidden(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [M, D], weight [V, D], target_ids [M] -> log-probabilities of the targets and entropies of
    softmax(hidden @ weight.T / temperature), [M] float32 each, in nats and differentiable.

    group: of the processes that share the vocabulary; `weight` is then this one's part of it, and the targets
    are counted from its first row. Under autocast products are rounded as those of a linear layer are.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    is_needed = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    num_kept = KEPT_BYTES // (hidden.element_size() * max(1, len(hidden))) if is_needed else 0
    with torch.autocast(device, enabled=False):
        return ScoresOfHidden.apply(hidden, weight, target_ids, temperature, group, num_kept)  # type: ignore[misc]


class ScoresOfHidden(torch.autograd.Function):
    """Some tokens and words at a time, forward and backward, where most logits are computed once more.

    Products are computed in the dtype of the hidden states, all else in float32. The words go first, so that
    each word's gradient is one product over all tokens, written once.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        target_ids: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        num_kept: int,
    ) -> tuple[Tensor, Tensor]:
        """As `scores_of_hidden`; num_kept: words whose products are kept for the backward pass, at most."""
        sums, kept = _Sums(hidden), []
        for words, tiles in _tiles(hidden, weight):
            part = weight[words].to(hidden.dtype)
            if words.start + len(part) <= num_kept:
                kept.append(hidden.new_empty(len(hidden), len(part)))
            for tokens in tiles:
                product = hidden[tokens] @ part.T
                if words.start + len(part) <= num_kept:
                    kept[-1][tokens] = product
                sums.add(tokens, _scaled(product, temperature), target_ids[tokens] - words.start)
        logprobs, entropies, normalizers = sums.finish(group)
        ctx.save_for_backward(hidden, weight, target_ids, normalizers, entropies, *kept)
        ctx.temperature = temperature  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, target_ids, normalizers, entropies, *kept = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        if grad_logprobs is None and grad_entropies is None:
            return None, None, None, None, None, None
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]  # type: ignore[attr-defined]
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.empty_like(weight) if needs_weight else None
        for i, (words, tiles) in enumerate(_tiles(hidden, weight)):
            part = weight[words].to(hidden.dtype)
            grad = hidden.new_empty(len(hidden), len(part))
            for tokens in tiles:
                product = kept[i][tokens].clone() if i < len(kept) else hidden[tokens] @ part.T
                grad[tokens] = logit_slopes(
                    _scaled(product, temperature).sub_(normalizers[tokens, None]),
                    target_ids[tokens] - words.start,
                    entropies[tokens],
                    None if grad_logprobs is None else grad_logprobs[tokens] / temperature,
                    None if grad_entropies is None else grad_entropies[tokens] / temperature,
                )
            if needs_hidden and grad.dtype == grad_hidden.dtype:
                grad_hidden.addmm_(grad, part)
            elif needs_hidden:
                grad_hidden += grad @ part
            if grad_weight is not None:
                grad_weight[words] = grad.T @ hidden
        return grad_hidden.to(hidden.dtype) if needs_hidden else None, grad_weight, None, None, None, None


class _Sums:
    """What the words so far say of each token, [M] each, summed up relative to the largest logit."""

    def __init__(self, hidden: Tensor) -> None:
        self.largest = torch.full((len(hidden),), torch.finfo(torch.float32).min, device=hidden.device)
        self.exps = torch.zeros_like(self.largest)  # of exp(x - largest)
        self.weighted = torch.zeros_like(self.largest)  # of (x - largest) exp(x - largest)
        self.targets = torch.zeros_like(self.largest)  # the target's own x, once it has come

    def add(self, tokens: slice, logits: Tensor, target_ids: Tensor) -> None:
        """logits [m, words] float32 of some tokens, written over; target_ids [m] counted from these words."""
        columns, inside = columns_of(target_ids, logits.shape[1])
        self.targets[tokens] += torch.where(inside, logits.gather(1, columns)[:, 0], 0.0)
        self._rebase(tokens, torch.maximum(self.largest[tokens], logits.amax(1)))
        exps = exp(logits.sub_(self.largest[tokens, None]))
        self.exps[tokens] += exps.sum(1)
        self.weighted[tokens] += torch.linalg.vecdot(exps, logits)

    def _rebase(self, tokens: slice, largest: Tensor) -> None:
        shift = self.largest[tokens] - largest
        self.weighted[tokens] = (self.weighted[tokens] + self.exps[tokens] * shift) * shift.exp()
        self.exps[tokens] *= shift.exp()
        self.largest[tokens] = largest

    def finish(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and normalizers, [M] each, over the vocabularies of all processes."""
        if group is not None:
            largest = self.largest.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            self._rebase(slice(None), largest)
            sums = torch.stack([self.exps, self.weighted, self.targets])
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
            self.exps, self.weighted, self.targets = sums.unbind()
        log_sum = self.exps.log()
        normalizers = self.largest + log_sum
        return self.targets - normalizers, log_sum - self.weighted / self.exps, normalizers


def _scaled(products: Tensor, temperature: float) -> Tensor:
    """Logits in float32, to be written over as the products may be."""
    logits = products.float()
    return logits.div_(temperature) if temperature != 1.0 else logits


def _tiles(hidden: Tensor, weight: Tensor) -> list[tuple[slice, list[slice]]]:
    """Words, and the tokens to go through with them."""
    num_tokens, num_words = CPU_TILE if hidden.device.type == "cpu" else GPU_TILE
    tokens = [slice(i, i + num_tokens) for i in range(0, len(hidden), num_tokens)]
    return [(slice(i, i + num_words), tokens) for i in range(0, len(weight), num_words)]
