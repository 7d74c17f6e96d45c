"""What one rank finds out or does on a disk that all see, told to the others."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from forge.errors import ForgeError

T = TypeVar("T")


def from_rank_0(function: Callable[[], T], rank: int) -> T:
    """What the function returns on rank 0, or a ForgeError of what it raises there, on every rank."""
    result: list[Any] = [None]
    if rank == 0:
        try:
            result = [function()]
        except ForgeError as error:
            result = [error]
        except OSError as error:  # its message names the file
            result = [ForgeError(str(error))]
    if dist.is_initialized():
        dist.broadcast_object_list(result, src=0)
    if isinstance(result[0], ForgeError):
        raise result[0]
    return result[0]
