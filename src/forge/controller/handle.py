"""ActorHandle: one actor mesh as its callers see it."""

import asyncio
from typing import Any

from forge.controller._monarch import ValueMesh
from forge.controller.actor import endpoint_of
from forge.controller.call import Outgoing
from forge.controller.client import Client
from forge.controller.lane import Lane
from forge.controller.service import Endpoint, Handle, caller_of
from forge.errors import ActorFailure, ForgeError


class ActorHandle(Handle):
    """Endpoints of one actor mesh, as attributes.

    Each has the verbs call, call_one, choose, broadcast (Monarch's) and route, fanout (a service's). A handle
    can be passed to other actors; only the process that started the mesh can shut it down.
    """

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._broadcasts: set[asyncio.Task[Any]] = set()

    def __getattr__(self, name: str) -> "ActorEndpoint":
        if name.startswith("_"):
            raise AttributeError(name)
        endpoint_of(self._cls, name)
        return ActorEndpoint(self._client, name, self._broadcasts)

    def __repr__(self) -> str:
        return f"<{self._name}: {self._cls.__name__} x {self._client.options.procs}>"


class ActorEndpoint(Endpoint):
    """One endpoint of an actor mesh. What the endpoint raises is raised here, as its own type."""

    def __init__(self, client: Client, method: str, broadcasts: set[asyncio.Task[Any]]) -> None:
        super().__init__(client, method)
        self._broadcasts = broadcasts

    async def call(self, *args: Any, **kwargs: Any) -> ValueMesh:
        """Runs on every process; a mesh of (point, value) in rank order."""

        async def send(lane: Lane, call: Outgoing) -> ValueMesh:
            return await lane.call_all(call.id, caller_of(call), self._method, args, kwargs)

        return await self._run(send, retry=self._retry is True)

    async def call_one(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on the only process; an error when there are several."""
        procs = self._client.options.procs
        if procs != 1:
            raise ForgeError(
                f"{self._client.options.name} has {procs} processes: use "
                f".{self._method}.call (all of them) or .choose (any one)"
            )
        return await self._run(self._send(args, kwargs), retry=self._retry is True)

    async def choose(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on one process of Monarch's choice."""

        async def send(lane: Lane, call: Outgoing) -> Any:
            return await lane.call_any(call.id, caller_of(call), self._method, args, kwargs)

        return await self._run(send, retry=self._retry is True)

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Starts it on every process and goes on; a failure is raised by the next call on this handle."""
        self._raise_failed_broadcasts()
        self._broadcasts.add(asyncio.ensure_future(self.call(*args, **kwargs)))

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """A service's `fanout` over this one replica."""
        return [await self.route(*args, **kwargs)]

    async def _run(self, send: Any, *, session: Any = None, retry: bool) -> Any:
        self._raise_failed_broadcasts()
        return await super()._run(send, session=session, retry=retry)

    def _raise_failed_broadcasts(self) -> None:
        finished = {task for task in self._broadcasts if task.done()}
        self._broadcasts -= finished
        for task in finished:
            if not task.cancelled() and task.exception() is not None:
                raise ActorFailure(
                    f"an earlier broadcast to {self._client.options.name} failed"
                ) from task.exception()
