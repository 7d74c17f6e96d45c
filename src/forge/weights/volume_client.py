"""VolumeClient: puts and gets of one volume. Which keys are where the registry knows."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from forge.errors import ForgeError, WeightsMissing
from forge.weights._torchstore import ActorError, Pipe, Request, SupervisionError
from forge.weights.transport import Transport
from forge.weights.volumes import Volume, volume_host, volume_name

_WAIT_S, _NBYTES_PER_S = 60.0, 50_000_000  # a volume that is slower than this is taken for dead


class VolumeClient:
    """Puts and gets tensors of a volume, each under a key of its own, by TorchStore's pipe.

    TorchStore's own client would ask its controller first, and tell it afterwards. Both raise WeightsMissing
    where the volume is gone or doesn't answer in time, and what ForgeError is raised inside of it.
    """

    def __init__(self, volume: str, actor: Volume) -> None:
        self._volume = volume
        self._pipe = Pipe(actor)

    async def put(self, key: str, value: Tensor) -> None:
        """value: [nbytes] uint8."""
        putting = self._pipe.put_to_storage_volume(key, Request.from_tensor(value))
        await self._answer(putting, len(value))

    async def get(self, key: str, nbytes: int) -> Tensor:
        """nbytes: at most so many come."""
        return await self._answer(self._pipe.get_from_storage_volume(key, Request.from_any(None)), nbytes)

    async def _answer(self, call: Coroutine[Any, Any, Any], nbytes: int) -> Any:
        moves = Transport.between(volume_host(self._volume)) is not Transport.SHARED_MEMORY
        limit_s = _WAIT_S + (nbytes / _NBYTES_PER_S if moves else 0.0)
        try:
            with forge_errors():
                return await asyncio.wait_for(call, limit_s)
        except TimeoutError:
            raise WeightsMissing(
                f"{volume_name(self._volume)} has not answered for {limit_s:.0f} s"
            ) from None
        except SupervisionError as error:
            raise WeightsMissing(f"{volume_name(self._volume)} does not answer: {error}") from error


@contextmanager
def forge_errors() -> Iterator[None]:
    """What an actor raises on purpose comes out as it is, without Monarch's ActorError around it."""
    try:
        yield
    except ActorError as error:
        if isinstance(error.exception, ForgeError):
            raise error.exception from None
        raise
