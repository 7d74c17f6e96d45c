"""RegistryActor: the registry as an actor of the root process, which everybody asks and waits at."""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from forge.errors import ForgeError, WeightsMissing
from forge.weights._torchstore import Actor, HostMesh, MeshFailure, concurrent_endpoint
from forge.weights.keys import PartKey
from forge.weights.process import Process
from forge.weights.registry import Reader, Registry, StoredPart, Version
from forge.weights.volumes import Volume, Volumes, volume_name

logger = logging.getLogger(__name__)

_LOOK_S = 0.2  # how often a retiring version's readers are looked at: a dead one can't say that it is gone


@dataclass(frozen=True, slots=True)
class Held:
    """A complete version that a reader may read until it lets go."""

    publisher: str
    parts: list[StoredPart]  # in order of the rank


def _answering(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Makes every error one that reaches the caller: Monarch loses those that can't be pickled."""

    @functools.wraps(method)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return await method(*args, **kwargs)
        except ForgeError:
            raise
        except Exception as error:
            logger.exception("the registry of the weights failed")
            raise ForgeError(f"the registry of the weights failed: {type(error).__name__}: {error}") from None

    return wrapper


class RegistryActor(Actor):
    """Found by name from every process of the job. All of it runs on one event loop."""

    def __init__(self) -> None:
        self._registry = Registry()
        self._volumes: Volumes | None = None  # while a store is open
        self._waiting: dict[Reader, bool] = {}  # False: it has given up
        self._retiring: dict[Version, asyncio.Task[None]] = {}
        self._dropping: set[asyncio.Task[None]] = set()
        self._change: asyncio.Future[None] | None = None

    # --- the store ---

    @concurrent_endpoint
    @_answering
    async def open_store(self, hosts: Sequence[HostMesh] | None) -> None:
        """hosts: see Volumes."""
        if self._volumes is not None:
            raise ForgeError("a weight store is open: call close_store() in the process that has opened it")
        self._registry, self._volumes = Registry(), Volumes(hosts)
        try:
            await self._volumes.open()
        except BaseException:
            volumes, self._volumes = self._volumes, None
            await volumes.close()
            raise

    @concurrent_endpoint
    @_answering
    async def close_store(self) -> None:
        """Ends the volumes; who waits for a version is told."""
        volumes, self._volumes = self._opened(), None
        self._tell()
        tasks = [*self._retiring.values(), *self._dropping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await volumes.close()

    def _opened(self) -> Volumes:
        if self._volumes is None:
            raise ForgeError("no weight store is open: call open_store() in the root process first")
        return self._volumes

    # --- publishing ---

    @concurrent_endpoint
    @_answering
    async def begin(
        self, version: int, rank: int, world_size: int, publisher: str, writer: Process
    ) -> PartKey:
        """See Registry.begin."""
        self._opened()
        return self._registry.begin(version, rank, world_size, publisher, writer)

    @concurrent_endpoint
    @_answering
    async def choose_volume(
        self, publisher: Process, rank: int, here: HostMesh, host_name: str | None
    ) -> str:
        """See Volumes.choose."""
        return await self._opened().choose(publisher, rank, here, host_name)

    @concurrent_endpoint
    @_answering
    async def volume(self, volume: str) -> Volume:
        """See Volumes.actor."""
        return await self._opened().actor(volume)

    @concurrent_endpoint
    @_answering
    async def publish(self, part: StoredPart) -> None:
        """See Registry.publish; data that nobody can read is deleted."""
        volumes = self._opened()
        try:
            if not volumes.is_there(part.volume):
                raise WeightsMissing(f"{volume_name(part.volume)} is gone")
            self._registry.publish(part, time.monotonic())
        except WeightsMissing:
            self._drop_soon((part.key.prefix,))
            raise
        self._tell()

    @concurrent_endpoint
    @_answering
    async def fail(self, key: PartKey, reason: str) -> None:
        """See Registry.fail; what there is of the version is deleted."""
        self._opened()
        found = self._registry.fail(key, reason)
        if found is not None:
            logger.warning("version %d of the weights is not published: %s", key.version, reason)
            self._drop_soon(found.prefixes)
            self._tell()

    # --- reading ---

    @concurrent_endpoint
    @_answering
    async def hold(self, version: int, reader: Reader, timeout_s: float) -> Held:
        """Waits until a version is complete, and keeps it until the reader lets go.

        Raises WeightsMissing after the time, or as soon as it is known that it will not come.
        """
        deadline = time.monotonic() + timeout_s
        self._waiting[reader] = True
        try:
            while True:
                self._opened()
                found, now = self._registry.find(version), time.monotonic()
                if not self._waiting[reader]:
                    raise WeightsMissing("the reader has given up")
                if found is not None:
                    self._registry.hold(found, reader, now)
                    return Held(found.publisher, [part for _, part in sorted(found.parts.items())])
                if now >= deadline:
                    raise WeightsMissing(self._registry.missing(version, timeout_s, now))
                await self._next_change(deadline - now)
        finally:
            del self._waiting[reader]

    @concurrent_endpoint
    @_answering
    async def renew(self, version: int, reader: Reader) -> None:
        """See Registry.renew."""
        self._registry.renew(version, reader, time.monotonic())

    @concurrent_endpoint
    @_answering
    async def let_go(self, version: int, reader: Reader) -> str | None:
        """Ends a hold, or the wait for one; see Registry.let_go."""
        if reader in self._waiting:
            self._waiting[reader] = False
        self._tell()
        return self._registry.let_go(version, reader)

    # --- ending ---

    @concurrent_endpoint
    @_answering
    async def retire(self, version: int, timeout_s: float) -> None:
        """Lets no new reader in, waits for those there are, deletes the data. Goes on if the caller ends."""
        self._opened()
        found = self._registry.start_retiring(version)
        if found is None:
            return
        if found not in self._retiring:
            self._tell()
            self._retiring[found] = task = asyncio.create_task(self._retire(found, timeout_s))
            task.add_done_callback(lambda _: self._retiring.pop(found))
        task = self._retiring[found]
        await asyncio.wait([task])  # its being cancelled, when the store closes, must not end this actor
        if task.cancelled():
            raise ForgeError(f"the store was closed while version {version} of the weights was retired")
        task.result()

    async def _retire(self, found: Version, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while readers := self._registry.readers(found, now := time.monotonic()):
            if now >= deadline:
                who = ", ".join(f"process {reader.process.pid}" for reader in readers)
                logger.warning(
                    "version %d of the weights is retired after %g s while %s still reads it",
                    found.number, timeout_s, who,
                )  # fmt: skip
                break
            await self._next_change(min(_LOOK_S, deadline - now))
        await self._drop(found.prefixes)
        self._registry.end(found)
        self._tell()

    @concurrent_endpoint
    @_answering
    async def versions(self) -> tuple[list[int], list[int]]:
        """The complete and the unfinished ones."""
        self._opened()
        return self._registry.complete(), self._registry.unfinished()

    @concurrent_endpoint
    @_answering
    async def newest_lost(self) -> tuple[int, str] | None:
        """See Registry."""
        self._opened()
        return self._registry.newest_lost

    # --- volumes that die ---

    @concurrent_endpoint
    @_answering
    async def lost(self, volume: str, reason: str) -> bool:
        """Somebody got no answer from a volume. Whether it gives this process none either, and so is gone."""
        if await self._opened().answers(volume):
            return False
        await self._lose(volume, reason)
        return True

    async def __supervise__(  # pyright: ignore[reportIncompatibleMethodOverride] - may be async
        self, failure: MeshFailure
    ) -> bool:
        """Nothing that this actor owns or sends to brings the run down when it dies."""
        volume = self._volumes.find(failure.mesh_name) if self._volumes is not None else None
        if volume is not None:
            await self._lose(volume, "its process is gone")
        return True

    async def _handle_undeliverable_message(self, message: object) -> bool:
        """Who waited for an answer is gone."""
        return True

    async def _lose(self, volume: str, reason: str) -> None:
        volumes = self._opened()
        if not volumes.is_there(volume):
            return
        reason = f"{volume_name(volume)} is gone: {reason}"
        versions = self._registry.lose(volume, reason)
        lost = ", ".join(str(found.number) for found in versions) or "none"
        logger.warning("%s; versions that are lost with it: %s", reason, lost)
        for found in versions:
            self._drop_soon(found.prefixes)
        self._tell()
        await volumes.forget(volume, reason)

    def _drop_soon(self, prefixes: tuple[str, ...]) -> None:
        task = asyncio.create_task(self._drop(prefixes))
        self._dropping.add(task)
        task.add_done_callback(self._dropped)

    def _dropped(self, task: asyncio.Task[None]) -> None:
        self._dropping.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("data of weights that nobody can read is not deleted: %s", error)

    async def _drop(self, prefixes: tuple[str, ...]) -> None:
        """What is stored under these keys, which no later push of the same version has."""
        for volume, error in (await self._opened().drop(prefixes)).items():
            await self._lose(volume, repr(error))

    # --- waiting ---

    def _tell(self) -> None:
        if self._change is not None:
            self._change.set_result(None)
            self._change = None

    async def _next_change(self, timeout_s: float) -> None:
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._change], timeout=timeout_s)
