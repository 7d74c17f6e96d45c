"""Runtime: everything that was started in this process, and its orderly end."""

import asyncio
import functools
import itertools
import logging
import os
import shutil
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from forge.controller._monarch import MeshFailure, leave, monarch_actor
from forge.controller.client import LocalClient
from forge.controller.directory import Directory
from forge.controller.handle import ActorHandle
from forge.controller.lane import cause_of_death
from forge.controller.launcher import Launcher, ThisHost
from forge.controller.ledger import Demand
from forge.controller.provisioner import Provisioner
from forge.controller.recipe import Recipe
from forge.controller.run_folder import make_run_folder
from forge.controller.service import Service, first_line
from forge.controller.stall import Ending, SignalWatch, StallWatch, install_sigusr1
from forge.controller.supervisor import Supervisor
from forge.controller.witness import Witness, start_witness
from forge.errors import RunStalled
from forge.observability import metrics

if TYPE_CHECKING:
    from forge.controller._monarch import HostMesh
    from forge.controller.options import ActorOptions

logger = logging.getLogger(__name__)
_TEARDOWN_S = 4.0  # for all services together; their processes end after it, willing or not


class Runtime:
    """Owns every service and actor. `async with Runtime():` closes all of it, newest first, after success,
    an error, Ctrl-C or SIGTERM.

    Scripts that never mention a runtime get one on first use; they end their services themselves or leave
    it to the end of the process, with which all of its children go.
    """

    _current: ClassVar["Runtime | None"] = None
    _serial: ClassVar = itertools.count()

    def __init__(self, *, launcher: Launcher | None = None, stall_timeout_s: float | None = None) -> None:
        """launcher: makes the hosts that actors run on; None: they run on this one.
        stall_timeout_s: when nothing has moved for so long, who waits for whom is printed, and the block
        ends with RunStalled; None: never."""
        self.provisioner = Provisioner(launcher or ThisHost())
        self.folder: Path = make_run_folder()  # of this run: what outlives the processes of its actors
        self.services: dict[str, Supervisor] = {}  # by uid, oldest first; single actors too
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._starts: set[asyncio.Task[None]] = set()  # not finished yet
        self._preparations: dict[type, asyncio.Task[None]] = {}
        self._stall_timeout_s = stall_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchers: list[Witness | SignalWatch | StallWatch] = []
        self._ending: Ending | None = None
        self._is_terminated = False
        self._handles_sigterm = False
        monarch_actor.unhandled_fault_hook = self._note_fault

    @classmethod
    def current(cls) -> "Runtime":
        """The runtime of this process, made on first use."""
        if cls._current is None:
            cls._current = cls()
        return cls._current

    async def __aenter__(self) -> Self:
        assert Runtime._current is None, "a runtime is open in this process already"
        Runtime._current = self
        self._open()
        self._terminate_on_sigterm(asyncio.current_task())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            await self.aclose()
        except asyncio.CancelledError as late:  # a signal while closing, which went on to its end
            error = error or late
        finally:
            if self._handles_sigterm:
                asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        if isinstance(error, asyncio.CancelledError):
            if self._ending is not None and self._ending.has_stalled:
                raise RunStalled(
                    f"nothing had moved for {self._stall_timeout_s:g} s; who waits for whom stands above"
                ) from None
            if self._is_terminated:
                raise SystemExit(128 + signal.SIGTERM) from None

    @staticmethod
    def leave() -> None:
        """Ends actors in this process for good, at the end of a program; none can be started afterwards."""
        leave()

    async def start_actor(
        self, options: "ActorOptions[Any]", args: tuple, kwargs: dict[str, Any]
    ) -> ActorHandle:
        """One mesh; replaced when it dies if its class says that it recovers its state."""
        return ActorHandle(await self._start(options, args, kwargs, heals=options.cls.recovers))

    async def start_service(
        self, options: "ActorOptions[Any]", args: tuple, kwargs: dict[str, Any]
    ) -> Service:
        """`num_replicas` meshes, which are replaced when they die."""
        return Service(await self._start(options, args, kwargs, heals=True))

    def check_gpus(self, services: Iterable["ActorOptions[Any]"]) -> None:
        """Raises NotEnoughGPUs when these can't all be started, before one of them is; keeps their places."""
        self.provisioner.check([Demand.of(options) for options in services])

    async def set_aside(self, num_hosts: int) -> "list[HostMesh]":
        """Monarch's meshes of so many hosts, on which no actor will run: to be asked before any has a place.

        ConfigError when no other host would be left.
        """
        return await self.provisioner.set_aside(num_hosts, self.folder)

    def on_close(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Runs `closer` after the last actor is stopped."""
        self._closers.append(closer)

    async def drain_metrics(self) -> dict[str, float]:
        """Everything recorded in all processes since the last call, merged."""
        return metrics.merge(await self._drain())

    async def recorded(self) -> dict[str, metrics.Stat]:
        """The same before it is merged; it is left for `drain_metrics`."""
        stats = metrics.combine(await self._drain())
        metrics.put_back(stats)
        return stats

    async def _drain(self) -> list[dict[str, metrics.Stat]]:
        drained = await asyncio.gather(*(service.drain_metrics() for service in self.services.values()))
        return [metrics.drain(), *(part for parts in drained for part in parts)]

    async def close(self, uid: str) -> None:
        """Stops one actor or service; a second time does nothing."""
        service = self.services.get(uid)
        if service is not None:
            await _uninterrupted(self._close(service))

    async def _close(self, service: Supervisor) -> None:
        await service.teardown()
        await service.stop()
        self._forget(service)

    def _forget(self, service: Supervisor) -> None:
        self.services.pop(service.uid, None)
        Directory.supervisors.pop(service.uid, None)
        Directory.closers.pop(service.uid, None)

    async def aclose(self) -> None:
        """Stops everything, newest first. Runs to its end even when the caller is cancelled meanwhile."""
        if Runtime._current is self:
            Runtime._current = None
        await _uninterrupted(self._close_all())

    async def _close_all(self) -> None:
        starts = [*self._starts, *self._preparations.values()]
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        for watcher in reversed(self._watchers):
            watcher.close()
        services = list(reversed(self.services.values()))
        errors: list[BaseException] = []
        try:
            async with asyncio.timeout(_TEARDOWN_S):
                for service in services:
                    await service.teardown()
        except TimeoutError:
            logger.warning("while closing: teardown took over %g s: ending all processes", _TEARDOWN_S)
        outcomes = await asyncio.gather(*(service.stop() for service in services), return_exceptions=True)
        errors += [o for o in outcomes if isinstance(o, BaseException)]
        for closer in (*reversed(self._closers), self.provisioner.close):
            try:
                await closer()
            except Exception as error:  # the rest must be closed too; logged below, none is lost
                errors.append(error)
        self._closers.clear()
        for service in services:
            self._forget(service)
        shutil.rmtree(self.folder, ignore_errors=True)
        for error in errors:
            logger.warning("while closing: %s: %s", type(error).__name__, first_line(error))

    async def _start(
        self, options: "ActorOptions[Any]", args: tuple, kwargs: dict[str, Any], *, heals: bool
    ) -> LocalClient:
        """Starts in a task that `aclose` can end, should the caller have given up waiting for it."""
        self._open()
        directory = Directory.open()
        uid = f"{options.name}-{os.getpid()}-{next(self._serial)}"
        recipe = Recipe(options, args, kwargs, self.provisioner, self.folder, state_dir=self.folder / uid)
        service = Supervisor(uid, recipe, heals=heals)
        start = asyncio.ensure_future(self._prepare_and_start(service))
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)
        await start
        return LocalClient(service, directory, Directory.closers[uid])

    async def _prepare_and_start(self, service: Supervisor) -> None:
        cls = service.options.cls
        task = self._preparations.get(cls)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._preparations[cls] = asyncio.ensure_future(cls.prepare())
        await asyncio.shield(task)  # another service of this class may wait for it too
        await self.provisioner.open(self.folder)
        await service.start()
        self.services[service.uid] = Directory.supervisors[service.uid] = service
        Directory.closers[service.uid] = functools.partial(self.close, service.uid)

    def _open(self) -> None:
        """Makes this process one that can be asked what it waits for."""
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._watchers.append(start_witness(self.folder, self._loop))
        if (signals := install_sigusr1(self.folder)) is not None:
            self._watchers.append(signals)
        task = asyncio.current_task()
        if task is not None and self._stall_timeout_s is not None:
            self._ending = Ending(task)
            self._watchers.append(StallWatch(self.folder, self._stall_timeout_s, self._ending))

    def _terminate_on_sigterm(self, task: "asyncio.Task[Any] | None") -> None:
        """SIGTERM ends the block like Ctrl-C does, unless the program handles it itself."""
        if (
            task is None
            or threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        ):
            return

        def terminate() -> None:
            self._is_terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        self._handles_sigterm = True

    def _note_fault(self, failure: MeshFailure) -> None:
        """Monarch's default hook ends this process with its child; here the child is replaced."""
        mesh_name = failure.mesh_name.rpartition("-")[0]
        logger.debug("fault of %s (seen on %s)", mesh_name, threading.current_thread().name)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pass_on_fault, mesh_name, cause_of_death(failure.report()))

    def _pass_on_fault(self, mesh_name: str, reason: str) -> None:
        for service in list(self.services.values()):
            if service.note_fault(mesh_name, reason):
                return


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
