"""What a loss keeps from step to step: told to it, carried over kills and resumes."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch.distributed.checkpoint.stateful import Stateful

from forge.actors.trainer.agreement import as_forge_error, own_rank
from forge.actors.trainer.loss_pass import depth
from forge.errors import ConfigError, ForgeError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@runtime_checkable
class ChangingLoss(Protocol):
    """A loss that changes with what it has seen: `after_step` is the only place where it may.

    It is called on every rank after each optimizer step that was not skipped, with the same metrics on all:
    those of the batch, as `forward_backward` returns them, over all that was gathered for the step. So the
    state is the same on all ranks. `state_dict` and `load_state_dict` keep it in snapshots and checkpoints.
    """

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """metrics: see forge.actors.trainer.tally for how those of parts become those of a whole."""
        ...


def check_state(loss: object) -> None:
    """Raises ConfigError for a loss that changes and could not be what it was after a kill."""
    if not isinstance(loss, ChangingLoss):
        return
    kind, both = type(loss), ("state_dict", "load_state_dict")
    newest = depth(kind, "after_step")  # those that are older know nothing of it
    missing = [name for name in both if not hasattr(loss, name) or depth(kind, name) > newest]
    if missing:
        raise ConfigError(
            "a loss with an after_step of its own must have its own state_dict and load_state_dict, which "
            f"carry what changes over kills and resumes: give {kind.__name__} {' and '.join(missing)}"
        )


def tell_step(loss: ChangingLoss, metrics: Mapping[str, float]) -> ForgeError | None:
    """Tells a loss of a step that was done; what came of it where it raises anything.

    A plain ForgeError: NotFinite would say that the step was not done.
    """
    try:
        loss.after_step(metrics)
    except Exception as error:  # of a user's code; translated, to travel to all ranks
        told = ForgeError(
            f"the weights were updated, but after_step of the loss failed: {type(error).__name__}: {error}"
        )
        told.__cause__ = error
        return told
    return None


def state_of(loss: object) -> dict[str, Any] | None:
    """A loss's state beside the name of its class, as plain data; None: it has none."""
    if not isinstance(loss, Stateful):
        return None
    return {"class": _name(loss), "state": _translated("state_dict", loss.state_dict)}


def restore(loss: object, stored: Mapping[str, Any] | None) -> None:
    """A loss goes on from `state_of` one of its class. From that of another it starts afresh, with a warning:
    their states have nothing to do with each other."""
    if not isinstance(loss, Stateful) or stored is None:
        return
    was, state = stored.get("class"), stored.get("state")
    if was == _name(loss):
        _translated("load_state_dict", lambda: loss.load_state_dict(state or {}))
    elif state and own_rank() == 0:
        logger.warning("the state of %s starts afresh: what was stored is that of %s", _name(loss), was)


def _name(loss: object) -> str:
    return f"{type(loss).__module__}.{type(loss).__qualname__}"


def _translated(what: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:  # of a user's code; translated, to be an answer like any other
        raise as_forge_error(error, f"{what} of the loss") from error
