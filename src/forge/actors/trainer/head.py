"""The model's last layer: hidden states -> logits, or what losses read of them without the logits."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forge.actors._titan import Linear

CPU_BLOCK_BYTES = 4 * 2**20
"""Of float32 logits at a time: what a core's cache holds."""
GPU_BLOCK_BYTES = 64 * 2**20
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
    """Blocks of the vocabulary at a time, forward and, computed once more, backward.

    A block's gradient of the weight is then one product over all tokens, written once. Products are computed
    in the dtype of the hidden states, all else in float32.
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
        for rows in _blocks(hidden, weight):
            sums.add(_scaled_logits(hidden, weight[rows], temperature), target_ids - rows.start)
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
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.empty_like(weight) if needs_weight else None
        for rows in _blocks(hidden, weight):
            part = weight[rows].to(hidden.dtype)
            # d logprob / d logit_j = [j is target] - p_j;  d entropy / d logit_j = -p_j (log p_j + entropy)
            log_p = _scaled_logits(hidden, part, temperature).sub_(normalizers[:, None])
            grad = log_p.exp()
            if grad_entropies is not None:
                slope = log_p.add_(entropies[:, None]).mul_(grad_entropies[:, None])
                grad *= slope.neg_() if grad_logprobs is None else slope.add_(grad_logprobs[:, None]).neg_()
            elif grad_logprobs is not None:
                grad *= -grad_logprobs[:, None]
            if grad_logprobs is not None:
                places, inside = _places(target_ids - rows.start, grad.shape[1])
                grad.scatter_add_(1, places, torch.where(inside, grad_logprobs, 0.0)[:, None])
            grad = grad.div_(temperature).to(hidden.dtype)
            if needs_hidden:
                grad_hidden += grad @ part
            if grad_weight is not None:
                grad_weight[rows] = grad.T @ hidden
        return grad_hidden.to(hidden.dtype) if needs_hidden else None, grad_weight, None, None, None


class _Sums:
    """What the blocks of the vocabulary say of each token, summed up relative to the largest logit so far."""

    def __init__(self, hidden: Tensor) -> None:
        zeros = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        self.largest = torch.full_like(zeros, torch.finfo(torch.float32).min)
        self.exps = zeros  # of exp(x - largest)
        self.weighted = zeros  # of (x - largest) exp(x - largest)
        self.targets = zeros  # the target's own x, where a block held it

    def add(self, logits: Tensor, target_ids: Tensor) -> None:
        """logits [M, block] float32, written over; target_ids [M] counted from the block's first."""
        places, inside = _places(target_ids, logits.shape[1])
        self.targets = torch.where(inside, logits.gather(1, places)[:, 0], self.targets)
        self._rebase(torch.maximum(self.largest, logits.amax(1)))
        exps = logits.sub_(self.largest[:, None]).exp()
        self.exps = self.exps + exps.sum(1)
        self.weighted = self.weighted + torch.linalg.vecdot(exps, logits)

    def _rebase(self, largest: Tensor) -> None:
        shift = self.largest - largest
        self.weighted = (self.weighted + self.exps * shift) * shift.exp()
        self.exps = self.exps * shift.exp()
        self.largest = largest

    def finish(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and normalizers, [M] each, over the vocabularies of all processes."""
        if group is not None:
            largest = self.largest.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            self._rebase(largest)
            sums = torch.stack([self.exps, self.weighted, self.targets])
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
            self.exps, self.weighted, self.targets = sums.unbind()
        log_sum = self.exps.log()
        normalizers = self.largest + log_sum
        return self.targets - normalizers, log_sum - self.weighted / self.exps, normalizers


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ weight.to(hidden.dtype).T).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


def _places(target_ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Targets [M] -> indices [M, 1] that exist, and [M] which of them are meant."""
    inside = (target_ids >= 0) & (target_ids < size)
    return torch.where(inside, target_ids, 0)[:, None], inside


def _blocks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Rows of the weight whose logits are computed at a time."""
    limit = CPU_BLOCK_BYTES if hidden.device.type == "cpu" else GPU_BLOCK_BYTES
    size = max(128, limit // (4 * max(1, len(hidden))) // 64 * 64)
    return [slice(start, min(start + size, len(weight))) for start in range(0, len(weight), size)]


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
