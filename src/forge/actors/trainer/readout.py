"""What a model says at the tokens that are asked about; the head sees no others."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Readout:
    """The head over M tokens of a stream. One of its methods must be called, once, on every process.

    With context parallelism a process computes those of its own tokens and gets the others' results.
    """

    head: Callable[..., Any]  # see head.TokenHead
    hidden: Tensor  # [max(m, 1), D], of the m tokens that this process has
    places: Tensor  # [m]: which of the M they are
    size: int  # M
    group: dist.ProcessGroup | None = None  # of the processes that have the others
    said: list[Tensor] = field(default_factory=list)  # what the head gave so far

    def logits(self) -> Tensor:
        """[M, V], of the tokens that follow."""
        logits = self.head(self.hidden[None])
        self.said.append(logits)
        return self._of_all((logits.full_tensor() if isinstance(logits, DTensor) else logits)[0])

    def logprobs(self, target_ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """target_ids [M] -> their log-probabilities and the entropies there, [M] float32 each, in nats."""
        own = target_ids[self.places]
        if not len(own):
            own = target_ids.new_zeros(1)
        both = self.head(self.hidden[None], target_ids=own[None], temperature=temperature)
        self.said.extend(both)
        logprobs, entropies = self._of_all(torch.cat(both).T).unbind(1)
        return logprobs, entropies

    def nothing(self) -> Tensor:
        """0, with a gradient of 0 for every weight, which sharded passes need of every process.

        May be called after another method that came to nothing.
        """
        if not self.said:
            self.logits()
        sums = [values.sum() for values in self.said]
        whole = [total.full_tensor() if isinstance(total, DTensor) else total for total in sums]
        return torch.stack(whole).sum() * 0.0

    def _of_all(self, own: Tensor) -> Tensor:
        own = own[: len(self.places)]
        if self.group is None:
            return own
        return _Assembled.apply(own, self.places, self.size, self.group)  # pyright: ignore[reportReturnType]


class _Assembled(torch.autograd.Function):
    """Values [m, ...] of each process -> [M, ...], the same on all.

    Each process computes the same loss of them, and passes on the gradient of its own values only: those of
    the weights are summed over the processes afterwards.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx,
        own: Tensor,
        places: Tensor,
        size: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(places)
        values = own.new_zeros(size, *own.shape[1:]).index_copy_(0, places, own)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        [places] = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad.index_select(0, places), None, None, None
