"""Directory: an actor in the root process where handles that have travelled learn about their service."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from forge.controller._monarch import Actor, concurrent_endpoint, this_proc
from forge.controller.dispatcher import Roster
from forge.controller.host import travels
from forge.errors import ActorFailure

if TYPE_CHECKING:
    from forge.controller.supervisor import Supervisor

T = TypeVar("T")


class Directory(Actor):
    """Answers for the supervisors of this process. They live in the user's event loop, this in Monarch's."""

    supervisors: ClassVar[dict[str, "Supervisor"]] = {}  # by their uid; those of the open runtime
    closers: ClassVar[dict[str, Callable[[], Awaitable[None]]]] = {}  # what shuts each of them down
    loop: ClassVar[asyncio.AbstractEventLoop]
    context: ClassVar[contextvars.Context]  # in which calls to Monarch come from the root, not from here
    _mesh: ClassVar[Any] = None

    name = "directory"

    @classmethod
    def open(cls) -> Any:
        """Monarch's mesh of the one directory of this process; to be called in the user's event loop."""
        cls.loop, cls.context = asyncio.get_running_loop(), contextvars.copy_context()
        if cls._mesh is None:
            cls._mesh = this_proc().spawn("directory", Directory)
        return cls._mesh

    @concurrent_endpoint
    @travels
    async def next_roster(self, uid: str, epoch: int) -> Roster:
        """The roster of a service, as soon as it is newer than `epoch`."""
        return await self._in_root(uid, lambda supervisor: supervisor.next_roster(epoch))

    @concurrent_endpoint
    @travels
    async def begin_fanout(self, uid: str) -> Roster:
        """See Supervisor.begin_fanout."""
        return await self._in_root(uid, lambda supervisor: _async(supervisor.begin_fanout))

    @concurrent_endpoint
    @travels
    async def report_lost(self, uid: str, index: int, generation: int, reason: str) -> None:
        """See Supervisor.report_lost."""
        await self._in_root(uid, lambda s: _async(lambda: s.report_lost(index, generation, reason)))

    @concurrent_endpoint
    @travels
    async def replicas(self, uid: str) -> list:
        """See Supervisor.replicas."""
        return await self._in_root(uid, lambda supervisor: supervisor.replicas())

    @concurrent_endpoint
    @travels
    async def scale(self, uid: str, num_replicas: int) -> None:
        """See Supervisor.scale."""
        await self._in_root(uid, lambda supervisor: supervisor.scale(num_replicas))

    async def _in_root(self, uid: str, work: Callable[["Supervisor"], Awaitable[T]]) -> T:
        """Runs something of a supervisor in the user's event loop."""
        here = asyncio.get_running_loop()
        done: asyncio.Future[T] = here.create_future()

        async def run() -> None:
            try:
                if uid not in Directory.supervisors:
                    raise ActorFailure("the service of this handle was shut down")
                result = await work(Directory.supervisors[uid])
            except BaseException as error:  # handed over to the one who asked, in the other event loop
                here.call_soon_threadsafe(_settle, done, None, error)
                if isinstance(error, asyncio.CancelledError):
                    raise
            else:
                here.call_soon_threadsafe(_settle, done, result, None)

        def start() -> None:
            _tasks.add(
                task := Directory.loop.create_task(run(), name="directory", context=Directory.context.copy())
            )
            task.add_done_callback(_tasks.discard)

        Directory.loop.call_soon_threadsafe(start)
        return await done


_tasks: set[asyncio.Task[None]] = set()


async def _async(function: Callable[[], T]) -> T:
    return function()


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, asyncio.CancelledError):
        error = ActorFailure("the run is ending")
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
