"""One micro-batch through model and loss."""

from collections.abc import Callable, Mapping
from typing import Protocol, cast, get_args, runtime_checkable

import torch
from torch import Tensor

from forge.actors.trainer.agreement import as_forge_error
from forge.actors.trainer.head import spread
from forge.actors.trainer.micro_batch import NormalizeBy
from forge.actors.trainer.readout import Readout
from forge.data_models import TrainTargets
from forge.errors import ConfigError, ForgeError
from forge.rl.loss.logprobs import compute_logprobs

Metrics = Mapping[str, Tensor | float]
Loss = Callable[..., tuple[Tensor, Metrics]]
"""(logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs) -> (loss, metrics).

`proximal_logprobs` [N, T] is given as a keyword beside these when the batch holds it, and only then.
"""

RESERVED = frozenset({"total", "skipped", "num_tokens", "grad_norm", "lr"})
"""Metrics of a step that are not the loss's."""


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
        *,
        proximal_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """logprobs, entropy [N, T] float32, 0 where masked; the rest as in a call of the loss."""
        ...


def normalizer_of(loss: Loss) -> NormalizeBy:
    """What a loss averages over, by its attribute `normalize_by`; raises ConfigError for anything else."""
    normalize_by = getattr(loss, "normalize_by", "sequences")
    if normalize_by not in get_args(NormalizeBy):
        raise ConfigError(
            f'normalize_by of a loss must be "sequences" or "tokens", what it averages over, got '
            f"{normalize_by!r} of {type(loss).__name__}"
        )
    return cast("NormalizeBy", normalize_by)


def token_means_of(loss: Loss) -> frozenset[str]:
    """The metrics that a loss averages over tokens whatever the loss is averaged over, by its attribute
    `token_means`; the others are averaged as the loss is."""
    return frozenset(getattr(loss, "token_means", ()))


def reads_logprobs(loss: Loss) -> bool:
    """Whether a loss can be spared the logits: not when a subclass says anew what a call of it computes."""
    return isinstance(loss, LogprobsLoss) and (
        depth(type(loss), "from_logprobs") <= depth(type(loss), "__call__")
    )


def depth(kind: type, method: str) -> int:
    """How many classes up the method is defined."""
    return next((i for i, owner in enumerate(kind.__mro__) if method in vars(owner)), len(kind.__mro__))


def loss_of(readout: Readout, loss: Loss, targets: TrainTargets) -> tuple[Tensor, Metrics]:
    """The loss of one micro-batch (on the model's device), a scalar to call backward on, and its metrics.

    readout: of the sources of the unmasked targets, in their order.
    Raises ForgeError for whatever the loss raises, or when it returns something else.
    """
    mask = targets.loss_mask.bool()
    if not mask.any():  # nothing to learn here, but every process must run the same passes
        return readout.nothing(), {}
    rest = (targets.advantages, targets.generator_logprobs, mask, targets.ref_logprobs)
    proximal = targets.proximal_logprobs
    more = {} if proximal is None else {"proximal_logprobs": proximal}
    if reads_logprobs(loss):
        scores = readout.logprobs(targets.target_ids[mask], targets.temperature)
        given = [spread(score, mask) for score in scores]
        return _call(loss.from_logprobs, *given, *rest, **more)  # pyright: ignore[reportFunctionMemberAccess]
    logits = readout.logits().float() / targets.temperature
    return _call(loss, spread(logits, mask), targets.target_ids, *rest, **more)


def logprobs_of(readout: Readout, loss: Loss, targets: TrainTargets) -> Tensor:
    """[N, T] float32, 0 where masked: log-probabilities of the targets, computed as for this loss."""
    mask = targets.loss_mask.bool()
    if not mask.any():
        return torch.zeros_like(targets.target_ids, dtype=torch.float32)
    if reads_logprobs(loss):
        return spread(readout.logprobs(targets.target_ids[mask], targets.temperature)[0], mask)
    logits = readout.logits().float() / targets.temperature
    return compute_logprobs(spread(logits, mask), targets.target_ids, loss_mask=mask)


def whole_batch_metrics(loss: Loss, metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a batch, merged from those of its parts, with what the loss's method `whole_batch_metrics`
    makes of them: numbers that can't be merged, as a ratio of means is none of ratios."""
    derive = getattr(loss, "whole_batch_metrics", None)
    if derive is None:
        return dict(metrics)
    try:
        return dict(derive(metrics))
    except Exception as error:  # of a user's code; translated, as what a loss raises is
        raise as_forge_error(error, "whole_batch_metrics of the loss") from error


def _call(loss: Callable[..., object], *args: Tensor | None, **more: Tensor) -> tuple[Tensor, Metrics]:
    try:
        answer = loss(*args, **more)
    except ForgeError:
        raise
    except Exception as error:  # of a user's code; translated, to travel to all ranks
        raise as_forge_error(error, "the loss") from error
    wrong = _wrong_with(answer)
    if wrong is not None:
        raise ForgeError(
            "a loss must return (loss, metrics): a scalar tensor that gradients flow through, and a dict of "
            f"numbers or tensors of one element; {wrong}"
        )
    return answer  # pyright: ignore[reportReturnType]


def _wrong_with(answer: object) -> str | None:
    if not isinstance(answer, tuple) or len(answer) != 2:
        return f"got {type(answer).__name__}" + (f" of {len(answer)}" if isinstance(answer, tuple) else "")
    loss, metrics = answer
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        shape = f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else ""
        return f"its loss is a {type(loss).__name__}{shape}"
    if torch.is_grad_enabled() and not loss.requires_grad:
        return "its loss has no gradient: was it detached?"
    if not isinstance(metrics, Mapping):
        return f"its metrics are a {type(metrics).__name__}"
    for name, value in metrics.items():
        if name in RESERVED:
            return f"its metric {name} has the name of one of the trainer's own: give it another"
        if isinstance(value, Tensor) and value.numel() != 1:
            return f"its metric {name} is a tensor of shape {list(value.shape)}"
        if not isinstance(value, Tensor | float | int):
            return f"its metric {name} is a {type(value).__name__}"
    return None


def as_floats(metrics: Metrics) -> dict[str, float]:
    """Metrics as numbers, fetched from the device at once."""
    tensors = [value.detach().float().reshape(()) for value in metrics.values() if isinstance(value, Tensor)]
    if not tensors:
        return {name: float(value) for name, value in metrics.items()}
    device = max((t.device for t in tensors), key=lambda device: device.type != "cpu")
    numbers = iter(torch.stack([t.to(device) for t in tensors]).tolist())
    return {n: next(numbers) if isinstance(v, Tensor) else float(v) for n, v in metrics.items()}
