"""Runtime: everything that was started in this process, and its orderly end."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar, Self

from forge.controller._monarch import MeshFailure, leave, monarch_actor
from forge.controller.handle import ActorHandle, first_line
from forge.controller.mesh import Mesh
from forge.controller.provisioner import Provisioner
from forge.controller.service import Service
from forge.observability import metrics

if TYPE_CHECKING:
    from forge.controller.options import ActorOptions

logger = logging.getLogger(__name__)


class Runtime:
    """Owns every process mesh. `async with Runtime():` closes all of it in reverse order, whatever happened.

    Scripts that never mention a runtime get one on first use; they end their services themselves or leave
    it to the end of the process, with which all of its children go.
    """

    _current: ClassVar["Runtime | None"] = None

    def __init__(self) -> None:
        self.provisioner = Provisioner()
        self._open: dict[int, tuple[Any, list[Mesh]]] = {}  # by id of the handle or service, oldest first
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._starts: set[asyncio.Task[list[Mesh]]] = set()  # not finished yet
        self._preparations: dict[type, asyncio.Task[None]] = {}
        monarch_actor.unhandled_fault_hook = _note_fault

    @classmethod
    def current(cls) -> "Runtime":
        """The runtime of this process, made on first use."""
        if cls._current is None:
            cls._current = cls()
        return cls._current

    async def __aenter__(self) -> Self:
        assert Runtime._current is None, "a runtime is open in this process already"
        Runtime._current = self
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @staticmethod
    def leave() -> None:
        """Ends actors in this process for good, at the end of a program; none can be started afterwards."""
        leave()

    async def start_actor(
        self, options: "ActorOptions[Any]", args: tuple, kwargs: dict[str, Any]
    ) -> ActorHandle:
        [mesh] = await self._start(options, args, kwargs)
        self._open[id(mesh.handle)] = (mesh.handle, [mesh])
        return mesh.handle

    async def start_service(
        self, options: "ActorOptions[Any]", args: tuple, kwargs: dict[str, Any]
    ) -> Service:
        meshes = await self._start(options, args, kwargs)
        service = Service(options.name, options.cls, meshes)
        self._open[id(service)] = (service, meshes)
        return service

    def on_close(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Runs `closer` after the last actor is stopped."""
        self._closers.append(closer)

    async def drain_metrics(self) -> dict[str, float]:
        """Everything recorded in all processes since the last call, merged."""
        meshes = [mesh for _, group in self._open.values() for mesh in group]
        drained = await asyncio.gather(*(mesh.drain_metrics() for mesh in meshes))
        return metrics.merge([metrics.drain(), *(part for parts in drained for part in parts)])

    async def close(self, handle: Any) -> None:
        """Stops one actor or service; a second time does nothing."""
        _, meshes = self._open.pop(id(handle), (None, []))
        await asyncio.gather(*(mesh.stop(self.provisioner) for mesh in meshes))

    async def aclose(self) -> None:
        """Stops everything, newest first. Runs to its end even when the caller is cancelled meanwhile."""
        if Runtime._current is self:
            Runtime._current = None
        await _uninterrupted(self._close_all())

    async def _close_all(self) -> None:
        errors: list[BaseException] = []
        for start in self._starts:
            start.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        meshes = [mesh for _, group in reversed(self._open.values()) for mesh in group]
        self._open.clear()
        outcomes = await asyncio.gather(
            *(mesh.stop(self.provisioner) for mesh in meshes), return_exceptions=True
        )
        errors += [o for o in outcomes if isinstance(o, BaseException)]
        for closer in reversed(self._closers):
            try:
                await closer()
            except Exception as error:  # the rest must be closed too; logged below, none is lost
                errors.append(error)
        self._closers.clear()
        for error in errors:
            logger.warning("while closing: %s: %s", type(error).__name__, first_line(error))

    async def _start(self, options: "ActorOptions[Any]", args: tuple, kwargs: dict[str, Any]) -> list[Mesh]:
        """Starts meshes in a task that `aclose` can end, should the caller have given up waiting for it."""
        start = asyncio.ensure_future(self._start_meshes(options, args, kwargs))
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)
        return await start

    async def _start_meshes(
        self, options: "ActorOptions[Any]", args: tuple, kwargs: dict[str, Any]
    ) -> list[Mesh]:
        per_replica = options.procs if options.with_gpus else 0
        gpus = self.provisioner.reserve(options.name, per_replica * options.num_replicas)
        if options.cls not in self._preparations:
            self._preparations[options.cls] = asyncio.ensure_future(options.cls.prepare())
        await self._preparations[options.cls]
        starts = [
            Mesh.start(
                self.provisioner, options, gpus[i * per_replica : (i + 1) * per_replica], i, args, kwargs
            )
            for i in range(options.num_replicas)
        ]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        errors = [o for o in outcomes if isinstance(o, BaseException)]
        if errors:
            started = [o for o in outcomes if isinstance(o, Mesh)]
            await asyncio.gather(*(mesh.stop(self.provisioner) for mesh in started))
            raise errors[0]
        return [o for o in outcomes if isinstance(o, Mesh)]


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


def _note_fault(failure: MeshFailure) -> None:
    """Monarch's default hook ends this process with its child; here the next call on the child raises."""
    text = f"process of {failure.mesh_name} is gone"
    # A mesh that we stop reports its own end in the same way; only the log tells, at the lowest level.
    logger.debug("%s (seen on %s)", text, threading.current_thread().name)
