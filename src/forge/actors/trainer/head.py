"""The model's last layer: hidden states -> logits, or what losses read of them without the logits."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forge.actors._titan import Linear

CPU_TILE = (256, 1024)
"""Tokens and words whose logits are computed at a time: 1 MiB of float32, which a core's cache holds."""
GPU_TILE = (4096, 4096)
"""The same for GPUs: large enough for products at full speed."""


class TokenHead(Linear):
    """The projection to the vocabulary, whose weight may be sharded over it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    # `input` is torchtitan's name: its sharding rules refer to it, and they know of no other positional one.
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: Tensor, *, target_ids: Tensor | None = None, temperature: float = 1.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """input [1, M, D] -> logits [1, M, V], a DTensor where the weight is one.

        With target_ids [1, M]: log-probabilities of the targets and entropies of softmax(logits /
        temperature), both [1, M] float32, in nats and differentiable. No [M, V] tensor is made then.
        """
        if target_ids is None:
            return super().forward(input)
        hidden, weight = input, self.weight
        group, offset = None, 0
        if isinstance(weight, DTensor):
            assert weight.placements == (Shard(0),), "the vocabulary must be sharded, or not at all"
            _, (offset, _) = compute_local_shape_and_global_offset(
                weight.shape, weight.device_mesh, weight.placements
            )
            group = weight.device_mesh.get_group()
            weight = weight.to_local()
        if isinstance(hidden, DTensor):  # the same everywhere; each process adds its part to the gradient
            hidden = hidden.to_local(grad_placements=[Partial()])
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        with torch.autocast(hidden.device.type, enabled=False):
            logprobs, entropies = TokenLogprobs.apply(  # type: ignore[misc]
                hidden[0], weight, target_ids[0] - offset, temperature, group
            )
        return logprobs[None], entropies[None]


class TokenLogprobs(torch.autograd.Function):
    """Some tokens and words at a time, forward and, computed once more, backward.

    Products are computed in the dtype of the hidden states, all else in float32. Backward the words go first,
    so that each word's gradient is one product over all tokens, written once.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        target_ids: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        """hidden [M, D], weight [V, D] (of this process), target_ids [M] counted from its first row."""
        sums = _Sums(hidden)
        for words, tiles in _tiles(hidden, weight):
            part = weight[words].to(hidden.dtype)
            for tokens in tiles:
                sums.add(tokens, _logits(hidden[tokens], part, temperature), target_ids[tokens] - words.start)
        logprobs, entropies, normalizers = sums.finish(group)
        ctx.save_for_backward(hidden, weight, target_ids, normalizers, entropies)
        ctx.temperature = temperature  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, target_ids, normalizers, entropies = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]  # type: ignore[attr-defined]
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropies)
        grad_targets = grad_logprobs[:, None] / temperature
        spreads = None if grad_entropies is None else grad_entropies[:, None] / temperature
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.empty_like(weight) if needs_weight else None
        for words, tiles in _tiles(hidden, weight):
            part = weight[words].to(hidden.dtype)
            grad = hidden.new_empty(len(hidden), len(part))
            for tokens in tiles:
                log_p = _logits(hidden[tokens], part, temperature).sub_(normalizers[tokens, None])
                # d logprob / d logit_j = [j is target] - p_j
                # d entropy / d logit_j = -p_j (log p_j + entropy)
                p, slope = log_p.exp(), -grad_targets[tokens]
                if spreads is not None:
                    slope = log_p.add_(entropies[tokens, None]).mul_(-spreads[tokens]).add_(slope)
                places, inside = _places(target_ids[tokens] - words.start, len(part))
                at_targets = torch.where(inside[:, None], grad_targets[tokens], 0.0)
                grad[tokens] = p.mul_(slope).scatter_add_(1, places, at_targets)
            if needs_hidden:
                grad_hidden += grad @ part
            if grad_weight is not None:
                grad_weight[words] = grad.T @ hidden
        return grad_hidden.to(hidden.dtype) if needs_hidden else None, grad_weight, None, None, None


class _Sums:
    """What the words so far say of each token, [M] each, summed up relative to the largest logit."""

    def __init__(self, hidden: Tensor) -> None:
        self.largest = torch.full((len(hidden),), torch.finfo(torch.float32).min, device=hidden.device)
        self.exps = torch.zeros_like(self.largest)  # of exp(x - largest)
        self.weighted = torch.zeros_like(self.largest)  # of (x - largest) exp(x - largest)
        self.targets = torch.zeros_like(self.largest)  # the target's own x, once it has come

    def add(self, tokens: slice, logits: Tensor, target_ids: Tensor) -> None:
        """logits [m, words] float32 of some tokens, written over; target_ids [m] counted from these words."""
        places, inside = _places(target_ids, logits.shape[1])
        self.targets[tokens] += torch.where(inside, logits.gather(1, places)[:, 0], 0.0)
        self._rebase(tokens, torch.maximum(self.largest[tokens], logits.amax(1)))
        exps = logits.sub_(self.largest[tokens, None]).exp()
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


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


def _places(target_ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Targets [M] -> indices [M, 1] that exist, and [M] which of them are meant."""
    inside = (target_ids >= 0) & (target_ids < size)
    return torch.where(inside, target_ids, 0)[:, None], inside


def _tiles(hidden: Tensor, weight: Tensor) -> list[tuple[slice, list[slice]]]:
    """Words, and the tokens to go through with them."""
    num_tokens, num_words = CPU_TILE if hidden.device.type == "cpu" else GPU_TILE
    tokens = [slice(i, i + num_tokens) for i in range(0, len(hidden), num_tokens)]
    return [(slice(i, i + num_words), tokens) for i in range(0, len(weight), num_words)]


def token_logprobs(logits: Tensor, target_ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The same of logits [M, V] that are there already, for target_ids [M]: two tensors [M] float32."""
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    return log_p.gather(-1, target_ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def spread(values: Tensor, loss_mask: Tensor) -> Tensor:
    """values [M, ...] at the M unmasked places -> [N, T, ...] with zeros elsewhere; differentiable."""
    places = loss_mask.flatten().nonzero().squeeze(1)
    if len(places) == loss_mask.numel():
        return values.view(*loss_mask.shape, *values.shape[1:])
    spread_out = values.new_zeros(loss_mask.numel(), *values.shape[1:])
    return spread_out.index_copy(0, places, values).view(*loss_mask.shape, *values.shape[1:])
