"""Work: what the trainer does, as it stands in its journal."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from forge.actors.trainer.micro_batch import MicroBatch
from forge.data_models import ForwardBackwardResult

Method = Literal["train_step", "forward_backward", "optim_step", "push_weights", "save_checkpoint"]
Answer = ForwardBackwardResult | dict[str, float]


@dataclass(frozen=True, slots=True)
class Work:
    """One call that changes the trainer, or whose result depends on when it is done."""

    number: int  # counted from 1 since the first start
    call: str | None
    method: Method
    batches: Sequence[MicroBatch] = ()  # every rank's
    version: int | None = None  # that is pushed
    state: dict[str, Any] | None = None  # of the caller from then on; None: as before
    wait: bool = True  # for a checkpoint to be complete


@dataclass(frozen=True, slots=True)
class Standing:
    """What the next call depends on beside the learner."""

    num_skipped: int = 0  # steps in a row
    state: dict[str, Any] = field(default_factory=dict)  # the caller's


@dataclass(frozen=True, slots=True)
class Failed:
    """The work of this number raised something unforeseen, and may do so again: memory ran out, or another
    rank was gone. What a loss raises is a ForgeError, an answer like any other."""

    number: int


@dataclass(frozen=True, slots=True)
class Unrecoverable:
    """Work was done since that could not be written down."""

    number: int
    why: str


Record = Work | Failed | Unrecoverable
