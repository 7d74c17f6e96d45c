"""Pushes: versions of the weights on their way to the store, each once, whatever is killed meanwhile."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.weights import Push

# forge.weights is imported where it is used: TorchStore takes seconds

logger = logging.getLogger(__name__)

KEPT_VERSIONS = 2
"""The newest, and the one before for readers that are slow."""


class Pushes:
    """One rank's pushes, one at a time: stored beside what the trainer does next.

    A kill within leaves a version without some of its parts: see `clear_unfinished`.
    """

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._storing: asyncio.Task[None] | None = None
        self._retiring: asyncio.Task[None] | None = None
        self._is_done = threading.Event()  # storing, well or not
        self._is_done.set()
        self._is_stored = True

    async def begin(self, version: int, pack: Callable[["Push"], Awaitable[None]]) -> None:
        """Returns when `pack` has packed this rank's part; storing it goes on. Waits until the push before is
        stored, and raises its error, or that of retiring, if nobody has asked for it."""
        from forge.weights import begin_push

        await self.stored()
        if self._retiring is not None and self._retiring.done():
            await self.finish()
        push = await begin_push(version, rank=self._rank, world_size=self._world_size)
        try:
            await pack(push)
        except BaseException as error:  # told to those who wait for the version, and raised again
            await push.fail(error)
            raise
        self._is_done.clear()
        self._is_stored = False
        self._storing = asyncio.create_task(self._store(version, push), name=f"push of version {version}")

    async def stored(self) -> None:
        """Returns when the part that was packed last is stored. Raises what went wrong with it, to the first
        who asks."""
        if (task := self._storing) is not None:
            await asyncio.wait([task])
            if self._storing is task:
                self._storing = None
                task.result()

    async def finish(self) -> None:
        """The same, and what is too old is retired."""
        await self.stored()
        if (task := self._retiring) is not None:
            await asyncio.wait([task])
            if self._retiring is task:
                self._retiring = None
                task.result()

    async def close(self) -> None:
        """Returns when the push under way is stored; what is too old is left to the store."""
        with contextlib.suppress(Exception):  # was logged
            await self.stored()
        if self._retiring is not None:
            self._retiring.cancel()
            await asyncio.gather(self._retiring, return_exceptions=True)

    def wait_stored(self) -> bool:
        """Waits while a part is being stored; whether the one that was packed last is. For the compute
        thread."""
        self._is_done.wait()
        return self._is_stored

    async def _store(self, version: int, push: "Push") -> None:
        try:
            await push.publish()
            self._is_stored = True
        except Exception as error:  # said at once, and raised to whoever asks
            logger.error("version %d of the weights could not be stored: %s", version, error)
            raise
        finally:
            self._is_done.set()
        if self._rank == 0:
            retiring = _retire_before(version, after=self._retiring)
            self._retiring = asyncio.create_task(retiring, name=f"retire before {version}")


async def _retire_before(version: int, after: asyncio.Task[None] | None) -> None:
    """Waits for slow readers of what is retired, also for those of the time before, whose error it raises."""
    from forge.weights import retire, versions

    if after is not None:
        await after
    older = [v for v in await versions() if v < version]
    await asyncio.gather(*(retire(v) for v in older[: 1 - KEPT_VERSIONS]))


async def pushed_versions() -> list[int]:
    """Those that are whole, ascending."""
    from forge.weights import versions

    return await versions()


async def clear_unfinished() -> None:
    """Retires what publishers that are gone left half published, or half retired."""
    from forge.weights import retire, unfinished

    for version in await unfinished():
        await retire(version)


def to_push_again(begun: Collection[int], whole: Collection[int]) -> list[int]:
    """Of the versions whose push was begun, those that the store should hold and does not."""
    kept = sorted({*begun, *whole})[-KEPT_VERSIONS:]
    return [version for version in kept if version not in whole]
