"""Clients: how a handle reaches its service, in the root process and in any other."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from forge.controller._monarch import ActorError
from forge.controller.directory import Directory
from forge.controller.dispatcher import Dispatcher, Roster
from forge.controller.lane import Member
from forge.errors import ForgeError

if TYPE_CHECKING:
    from forge.controller.options import ActorOptions
    from forge.controller.replica import ReplicaStatus
    from forge.controller.supervisor import Supervisor

logger = logging.getLogger(__name__)


class Client(Protocol):
    """What handles need of a service."""

    uid: str
    options: "ActorOptions[Any]"
    directory: Any

    def dispatcher(self) -> Dispatcher:
        """Calls go through here."""
        ...

    async def begin_fanout(self) -> None:
        """Brings the dispatcher up to date and marks that a fanout is on its way."""
        ...

    async def replicas(self) -> "list[ReplicaStatus]": ...

    async def scale(self, num_replicas: int) -> None: ...

    async def close(self) -> None: ...


class LocalClient:
    """In the root process: the supervisor is at hand."""

    def __init__(
        self, supervisor: "Supervisor", directory: Any, close: Callable[[], Awaitable[None]]
    ) -> None:
        self.uid = supervisor.uid
        self.options = supervisor.options
        self.directory = directory
        self._supervisor = supervisor
        self._close = close

    def dispatcher(self) -> Dispatcher:
        return self._supervisor.dispatcher

    async def begin_fanout(self) -> None:
        self._supervisor.begin_fanout()

    async def replicas(self) -> "list[ReplicaStatus]":
        return await self._supervisor.replicas()

    async def scale(self, num_replicas: int) -> None:
        await self._supervisor.scale(num_replicas)

    async def close(self) -> None:
        await self._close()


class RemoteClient:
    """In any other process: calls go straight to the replicas; who they are is followed in the background."""

    def __init__(self, uid: str, options: "ActorOptions[Any]", directory: Any, roster: Roster) -> None:
        self.uid = uid
        self.options = options
        self.directory = directory
        self._first_roster = roster
        self._dispatcher: Dispatcher | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def dispatcher(self) -> Dispatcher:
        if self._dispatcher is None:
            self._dispatcher = Dispatcher(
                self.options.name,
                self.options.router,
                max_concurrent=self.options.max_concurrent,
                down_timeout_s=self.options.down_timeout_s,
                report_lost=self._report_lost,
            )
            self._dispatcher.update(self._first_roster)
            self._in_background(self._follow(self._dispatcher))
        return self._dispatcher

    async def begin_fanout(self) -> None:
        self.dispatcher().update(await self._ask(self.directory.begin_fanout, self.uid))

    async def replicas(self) -> "list[ReplicaStatus]":
        return await self._ask(self.directory.replicas, self.uid)

    async def scale(self, num_replicas: int) -> None:
        await self._ask(self.directory.scale, self.uid, num_replicas)

    async def close(self) -> None:
        raise ForgeError(f"only the process that started {self.options.name} can shut it down")

    async def _follow(self, dispatcher: Dispatcher) -> None:
        """Learns of every change, until the service is shut down or the root process is gone."""
        try:
            while not dispatcher.roster.is_closed:
                epoch = dispatcher.roster.epoch
                dispatcher.update(await self._ask(self.directory.next_roster, self.uid, epoch))
        except Exception as error:  # no more news: what waits for it must not wait for ever
            logger.debug("%s: no more news of its replicas: %s", self.options.name, error)
            dispatcher.update(Roster(dispatcher.roster.epoch + 1, is_closed=True))

    def _report_lost(self, member: Member, reason: str) -> None:
        self._in_background(self._report(member, reason))

    async def _report(self, member: Member, reason: str) -> None:
        try:
            await self._ask(self.directory.report_lost, self.uid, member.index, member.generation, reason)
        except Exception as error:  # the root has its own eyes
            logger.debug("%s: could not report a lost replica: %s", self.options.name, error)

    async def _ask(self, endpoint: Any, *args: Any) -> Any:
        try:
            return await endpoint.call_one(*args)
        except ActorError as error:
            raise error.exception from None

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_remote: dict[str, RemoteClient] = {}


def client_of(uid: str, options: "ActorOptions[Any]", directory: Any, roster: Roster) -> Client:
    """This process's client of a service; all handles to one service share it."""
    supervisor = Directory.supervisors.get(uid)
    if supervisor is not None:
        return LocalClient(supervisor, directory, Directory.closers[uid])
    if uid not in _remote:
        _remote[uid] = RemoteClient(uid, options, directory, roster)
    return _remote[uid]
