"""ActorHost: the Monarch actor that holds one ForgeActor and forwards calls to it."""

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.controller._monarch import Actor, concurrent_endpoint, current_rank, current_size
from forge.controller.actor import ForgeActor
from forge.controller.call import Incoming, ledger, serving
from forge.controller.lane import Member
from forge.controller.parcel import FRAME_BYTES, pack, travelling, unpack
from forge.controller.peers import Peers
from forge.controller.witness import RUN_DIR_VARIABLE, start_witness
from forge.errors import ActorFailure
from forge.observability import metrics
from forge.observability.logs import configure_logging


@dataclass(frozen=True, slots=True)
class Seat:
    """What an actor is told of its place."""

    service: str
    replica: int
    generation: int
    state_dir: Path
    max_concurrent: int | None


@dataclass(frozen=True, slots=True)
class Pulse:
    """The answer to a health probe."""

    pid: int
    num_running: int  # calls in progress
    num_done: int  # calls answered since the start
    version: int | None = None  # of the weights it works with


def travels(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Lets only exceptions leave that the caller can unpickle; see `travelling`."""

    @functools.wraps(method)
    async def wrapper(self: "ActorHost", *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(self, *args, **kwargs)
        except asyncio.CancelledError:
            raise ActorFailure(f"{self.name}: the call was cancelled") from None
        except BaseException as error:  # translated, and always raised again
            raise travelling(error, self.name) from None

    return wrapper


class ActorHost(Actor):
    """One process's seat for a ForgeActor. Every endpoint is concurrent, so that calls overlap."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._actor: ForgeActor | None = None
        self._free: asyncio.Semaphore | None = None
        self._num_done = 0
        self._outbox: list[tuple[Any, tuple[str, bool, bytes]]] = []

    @concurrent_endpoint
    @travels
    async def construct(
        self, cls: type[ForgeActor], args: tuple, kwargs: dict[str, Any], seat: Seat, hosts: Any
    ) -> None:
        """Builds the ForgeActor."""
        actor = cls.__new__(cls)
        actor.rank = current_rank().rank
        actor.world_size = functools.reduce(int.__mul__, current_size().values(), 1)
        self.name = ledger.actor = f"{seat.service}[{seat.replica}]" + (
            f".{actor.rank}" if actor.world_size > 1 else ""
        )
        configure_logging(process=self.name)
        self._witness = start_witness(Path(os.environ[RUN_DIR_VARIABLE]), asyncio.get_running_loop())
        actor.replica, actor.generation, actor.state_dir = seat.replica, seat.generation, seat.state_dir
        actor.peers = Peers(cls, Member(seat.replica, 0, hosts, actor.world_size), self.name)
        if seat.max_concurrent is not None:
            self._free = asyncio.Semaphore(seat.max_concurrent)
        actor.__init__(*args, **kwargs)
        self._actor = actor

    @concurrent_endpoint
    @travels
    async def setup(self) -> None:
        await self._held.setup()

    @concurrent_endpoint
    @travels
    async def catch_up(self) -> None:
        await self._held.catch_up()

    @concurrent_endpoint
    @travels
    async def invoke(self, id: str, caller: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs one endpoint of the ForgeActor."""
        return await self._serve(id, caller, method, args, kwargs, self._free)

    @concurrent_endpoint
    @travels
    async def invoke_peer(
        self, id: str, caller: str, method: str, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """The same for a call from this actor's own ranks: it waits for no place."""
        return await self._serve(id, caller, method, args, kwargs, free=None)

    @concurrent_endpoint
    async def serve_frame(self, port: Any, calls: list[tuple[str, str, str, bytes]]) -> None:
        """Runs several calls at once. Each is answered through the port as soon as it is done."""
        await asyncio.gather(*(self._serve_packed(port, *call) for call in calls))

    @concurrent_endpoint
    async def cancel(self, id: str) -> None:
        """Ends a call that its caller has given up."""
        call = ledger.incoming.get(id)
        if call is not None:
            call.task.cancel()

    @concurrent_endpoint
    async def probe(self) -> Pulse:
        """Answers as long as the event loop turns, however many calls wait or run."""
        version = self._actor.weights_version if self._actor is not None else None
        return Pulse(os.getpid(), len(ledger.incoming), self._num_done, version)

    @concurrent_endpoint
    @travels
    async def drain_metrics(self) -> dict[str, metrics.Stat]:
        """Everything recorded in this process since the last call."""
        return metrics.drain()

    @concurrent_endpoint
    @travels
    async def teardown(self) -> None:
        if self._actor is not None:
            await self._actor.teardown()

    @property
    def _held(self) -> ForgeActor:
        assert self._actor is not None, "construct() comes first"
        return self._actor

    async def _serve(
        self,
        id: str,
        caller: str,
        method: str,
        args: tuple,
        kwargs: dict[str, Any],
        free: asyncio.Semaphore | None,
    ) -> Any:
        task = asyncio.current_task()
        assert task is not None
        ledger.incoming[id] = Incoming(id, caller, method, time.time(), task)
        try:
            with serving(id):
                if free is None:
                    return await getattr(self._held, method)(*args, **kwargs)
                async with free:
                    return await getattr(self._held, method)(*args, **kwargs)
        finally:
            ledger.incoming.pop(id, None)
            self._num_done += 1
            ledger.moved()

    async def _serve_packed(self, port: Any, id: str, caller: str, method: str, packed: bytes) -> None:
        try:
            args, kwargs = unpack(packed)
            answer = (id, True, pack(await self._serve(id, caller, method, args, kwargs, self._free)))
        except asyncio.CancelledError:
            answer = (id, False, pack(ActorFailure(f"{self.name}.{method} was cancelled")))
        except BaseException as error:  # the answer, for the one who called
            answer = (id, False, pack(travelling(error, self.name)))
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._send_answers)
        self._outbox.append((port, answer))

    def _send_answers(self) -> None:
        """What is ready in one turn of the event loop leaves together, in messages of bounded size."""
        outbox, self._outbox = self._outbox, []
        by_port: dict[int, tuple[Any, list[tuple[str, bool, bytes]], int]] = {}
        for port, answer in outbox:
            key = id(port)
            _, frame, size = by_port.get(key, (port, [], 0))
            frame.append(answer)
            size += len(answer[2])
            by_port[key] = (port, frame, size)
            if size >= FRAME_BYTES:
                port.send(frame)
                del by_port[key]
        for port, frame, _ in by_port.values():
            port.send(frame)
