"""ActorHandle: one actor mesh as its callers see it."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forge.controller._monarch import ActorError, SupervisionError, ValueMesh
from forge.controller.actor import ForgeActor
from forge.errors import ActorFailure, ForgeError, ReplicaLost


class ActorHandle:
    """Endpoints of one actor mesh, as attributes.

    Each has the verbs call, call_one, choose, broadcast (Monarch's) and route, fanout (a service's). A handle
    can be passed to other actors; only the process that started the mesh can shut it down.
    """

    def __init__(self, name: str, cls: type[ForgeActor], hosts: Any, num_procs: int) -> None:
        self._name = name
        self._cls = cls
        self._hosts = hosts  # Monarch mesh of ActorHost
        self._num_procs = num_procs
        self._broadcasts: set[asyncio.Task[Any]] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_broadcasts": set()}

    def __getattr__(self, name: str) -> "ActorEndpoint":
        if name.startswith("_"):
            raise AttributeError(name)
        return ActorEndpoint(self, check_endpoint(self._cls, name))

    def __repr__(self) -> str:
        return f"<{self._name}: {self._cls.__name__} x {self._num_procs}>"

    async def shutdown(self) -> None:
        """Stops the processes of this mesh."""
        from forge.controller.runtime import Runtime

        await Runtime.current().close(self)


class ActorEndpoint:
    """One endpoint of an actor mesh. What the endpoint raises is raised here, as its own type."""

    def __init__(self, handle: ActorHandle, method: str) -> None:
        self._handle = handle
        self._method = method

    async def call(self, *args: Any, **kwargs: Any) -> ValueMesh:
        """Runs on every process; a mesh of (point, value) in rank order."""
        self._raise_failed_broadcasts()
        with translated_errors(f"{self._handle._name}.{self._method}"):
            return await self._handle._hosts.invoke.call(self._method, args, kwargs)

    async def call_one(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on the only process; an error when there are several."""
        if self._handle._num_procs != 1:
            raise ForgeError(
                f"{self._handle!r} has {self._handle._num_procs} processes: use "
                f".{self._method}.call (all of them) or .choose (any one)"
            )
        return await self._on_rank(0, args, kwargs)

    async def choose(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on one process of Monarch's choice."""
        self._raise_failed_broadcasts()
        with translated_errors(f"{self._handle._name}.{self._method}"):
            return await self._handle._hosts.invoke.choose(self._method, args, kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Starts it on every process and goes on; a failure is raised by the next call on this handle."""
        self._raise_failed_broadcasts()
        self._handle._broadcasts.add(asyncio.ensure_future(self.call(*args, **kwargs)))

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """What a service's `route` does with one replica: runs on it, and returns rank 0's value."""
        if self._handle._cls.driver_only:
            return await self._on_rank(0, args, kwargs)
        return next(iter((await self.call(*args, **kwargs)).items()))[1]

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """A service's `fanout` over this one replica."""
        return [await self.route(*args, **kwargs)]

    async def _on_rank(self, rank: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._raise_failed_broadcasts()
        hosts = self._handle._hosts
        if self._handle._num_procs > 1:
            hosts = hosts.slice(procs=rank)
        with translated_errors(f"{self._handle._name}.{self._method}"):
            return await hosts.invoke.call_one(self._method, args, kwargs)

    def _raise_failed_broadcasts(self) -> None:
        finished = {task for task in self._handle._broadcasts if task.done()}
        self._handle._broadcasts -= finished
        for task in finished:
            if not task.cancelled() and task.exception() is not None:
                raise ActorFailure(f"an earlier broadcast to {self._handle!r} failed") from task.exception()


def check_endpoint(cls: type[ForgeActor], name: str) -> str:
    """The name itself when the class has such an endpoint; else an AttributeError that lists those it has."""
    if not getattr(getattr(cls, name, None), "__forge_endpoint__", False):
        raise AttributeError(f"{cls.__name__} has no endpoint {name!r}; it has {', '.join(cls.endpoints())}")
    return name


@contextmanager
def translated_errors(call: str) -> Iterator[None]:
    """Monarch's errors as the caller should see them: the endpoint's own exception, or ReplicaLost."""
    try:
        yield
    except ActorError as error:
        raise error.exception from None
    except SupervisionError as error:
        raise ReplicaLost(f"{call}: the process is gone ({cause_of_death(error)})") from None


def cause_of_death(error: SupervisionError) -> str:
    """What Monarch's report, which runs over many lines, says of how the process ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"Killed|sig=|exit|stopped|timeout", line, re.IGNORECASE)]
    return (telling or lines or [type(error).__name__])[-1][:300]


def first_line(error: BaseException) -> str:
    """The first line with words in it: Monarch's reports run over many."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
