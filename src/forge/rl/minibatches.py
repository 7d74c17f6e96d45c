"""Several updates on one batch: epochs over its minibatches, with what the policy was when they began."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from forge.controller import ActorHandle
from forge.data_models import ForwardBackwardResult, TrainInputs, TrainTargets
from forge.rl.loss import Loss, PolicyLoss
from forge.rl.loss.registry import signature_of

TrainBatch = tuple[Sequence[TrainInputs], Sequence[TrainTargets]]
"""What every data-parallel rank gets of one update: see `TitanTrainer.train_step`."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step of several, and what came of it."""

    minibatch: int  # its number
    targets: Sequence[TrainTargets]  # with proximal_logprobs where there are several updates
    result: ForwardBackwardResult


async def updates(
    trainer: ActorHandle,
    batches: Sequence[TrainBatch],
    *,
    epochs: int = 1,
    seed: int = 0,
    step: int = 0,
    loss: Loss | None = None,
) -> list[Update]:
    """Trains on each of the minibatches `epochs` times; returns what was done, in order.

    With more than one update `proximal_logprobs` are filled in before the first one: the ratio of a loss
    that corrects for the generator, and its clip, then measure how far the updates have moved the policy.
    loss: that of the trainer, which is spared them where it does not read them; None: it does.

    The order is that of `update_order`. Each update is one `train_step`, done once even where a process of
    the trainer is killed and replaced; one whose loss is not finite is skipped, and the others are done.
    """
    order = update_order(len(batches), epochs, seed=seed, step=step)
    if len(order) > 1 and (loss is None or reads_proximal(loss)):
        batches = await with_proximal(trainer, batches)
    done: list[Update] = []
    for number in order:
        inputs, targets = batches[number]
        done.append(Update(number, targets, await trainer.train_step.route(inputs, targets)))
    return done


def reads_proximal(loss: Loss) -> bool:
    """Whether a loss wants to know what the policy was before the first of several updates."""
    if isinstance(loss, PolicyLoss):
        return loss.correction is not None
    parameters = signature_of(getattr(loss, "from_logprobs", loss)).parameters.values()
    return any(p.name == "proximal_logprobs" or p.kind is p.VAR_KEYWORD for p in parameters)


def update_order(num_minibatches: int, epochs: int, *, seed: int, step: int) -> list[int]:
    """The numbers of the minibatches, one for each update: shuffled anew in each epoch, by (seed, step)
    alone, so that a run that is resumed need not remember it."""
    shuffled = random.Random(f"{seed} {step}")
    order: list[int] = []
    for _ in range(epochs):
        numbers = list(range(num_minibatches))
        shuffled.shuffle(numbers)
        order += numbers
    return order


async def with_proximal(trainer: ActorHandle, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
    """The same batches with the log-probabilities of the trainer's policy as it is now."""
    return [(inputs, await _proximal(trainer, inputs, targets)) for inputs, targets in batches]


async def _proximal(
    trainer: ActorHandle, inputs: Sequence[TrainInputs], targets: Sequence[TrainTargets]
) -> list[TrainTargets]:
    logprobs = await trainer.logprobs.route(inputs, targets)
    return [dataclasses.replace(t, proximal_logprobs=p) for t, p in zip(targets, logprobs, strict=True)]
