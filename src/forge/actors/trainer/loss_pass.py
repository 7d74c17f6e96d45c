"""One micro-batch through model and loss."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from forge.actors.trainer.head import spread
from forge.actors.trainer.micro_batch import NormalizeBy
from forge.actors.trainer.readout import Readout
from forge.data_models import TrainTargets

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs) -> (loss, metrics)."""


@runtime_checkable
class LogprobsLoss(Protocol):
    """A loss that reads nothing of the logits but the log-probability of each target and the entropy there.

    It is spared the [N, T, V] logits, which for short completions cost more than the model's last layers.
    """

    def from_logprobs(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        advantages: Tensor,
        generator_logprobs: Tensor,
        loss_mask: Tensor,
        ref_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """logprobs, entropy [N, T] float32, 0 where masked; the rest as in a call of the loss."""
        ...


def normalizer_of(loss: Loss) -> NormalizeBy:
    """What a loss averages over, by its attribute `normalize_by`."""
    return getattr(loss, "normalize_by", "sequences")


def loss_of(readout: Readout, loss: Loss, targets: TrainTargets) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch (on the model's device), a scalar to call backward on, and its metrics.

    readout: of the sources of the unmasked targets, in their order.
    """
    mask = targets.loss_mask.bool()
    if not mask.any():  # nothing to learn here, but every process must run the same passes
        return readout.nothing(), {}
    if isinstance(loss, LogprobsLoss):
        scores = readout.logprobs(targets.target_ids[mask], targets.temperature)
        logprobs, entropy = (spread(score, mask) for score in scores)
        return loss.from_logprobs(
            logprobs, entropy, targets.advantages, targets.generator_logprobs, mask, targets.ref_logprobs
        )
    return loss(
        spread(readout.logits().float() / targets.temperature, mask),
        targets.target_ids,
        targets.advantages,
        targets.generator_logprobs,
        mask,
        targets.ref_logprobs,
    )


def as_floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Metrics as numbers, fetched from the device at once."""
    tensors = [value for value in metrics.values() if isinstance(value, Tensor)]
    if not tensors:
        return {name: float(value) for name, value in metrics.items()}
    numbers = iter(torch.stack([t.detach().float().reshape(()) for t in tensors]).tolist())
    return {n: next(numbers) if isinstance(v, Tensor) else float(v) for n, v in metrics.items()}
