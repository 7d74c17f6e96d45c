"""What ranks tell each other of what one of them found out, did, or failed to do."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from forge.errors import ForgeError

T = TypeVar("T")


def own_rank() -> int:
    """This process's number among all."""
    return dist.get_rank() if dist.is_initialized() else 0


def from_every_rank(value: T) -> list[T]:
    """The values of all processes, in their order (a collective)."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raise_any(failures: Sequence[ForgeError | None], who: str = "rank") -> None:
    """Raises the first of those that several had, named by `who` they are, or the only one's."""
    for number, failure in enumerate(failures):
        if failure is not None:
            if len(failures) > 1:
                failure.args = (f"{who} {number}: {failure}",)
            raise failure


def from_rank_0(function: Callable[[], T], rank: int) -> T:
    """What the function returns on rank 0, or a ForgeError of what it raises there, on every rank.

    An error that is neither a ForgeError nor of the disk is raised as itself on rank 0.
    """
    result: list[Any] = [None]
    raised: Exception | None = None
    if rank == 0:
        try:
            result = [function()]
        except OSError as error:  # its message names the file
            result = [ForgeError(str(error))]
        except Exception as error:  # raised below, once the others know
            raised = error
            result = [as_forge_error(error, "rank 0")]
    if dist.is_initialized():
        dist.broadcast_object_list(result, src=0)
    if raised is not None:
        raise raised
    if isinstance(result[0], ForgeError):
        raise result[0]
    return result[0]


def as_forge_error(error: Exception, who: str) -> ForgeError:
    """An error that may travel to other ranks: itself, or one that says who raised what."""
    if isinstance(error, ForgeError):
        return error
    told = ForgeError(f"{who}: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
