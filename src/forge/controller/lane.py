"""Lane: this process's way to one replica."""

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from forge.controller._monarch import ActorError, Channel, SupervisionError, ValueMesh
from forge.controller.parcel import FRAME_BYTES, is_large, pack, unpack

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Member:
    """One replica as its callers need to know it."""

    index: int
    generation: int  # how often it was replaced
    hosts: Any  # Monarch mesh of ActorHost, one in every process of the replica
    num_procs: int
    pid: int | None = None  # of rank 0


class LaneLost(Exception):
    """The process behind a lane is gone; the message says how it ended. Never seen by a user."""

    is_unfit = False  # whether it lives, and said that it must not serve: it has done nothing of the call


class Lane:
    """Sends calls to one replica.

    A call that is alone goes straight to Monarch. Where several are in flight, those that are made in one
    turn of the event loop share a message, and so do answers that are ready in one turn: a message costs far
    more than a small call in it.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.load = 0  # calls of this process in flight
        self.num_done = 0
        self.is_open = True  # False once it is gone or takes no new calls
        hosts = member.hosts
        self._all = hosts
        self._first = hosts.slice(procs=0) if member.num_procs > 1 else hosts
        self._outbox: list[tuple[str, str, str, bytes]] = []
        self._answers: dict[str, asyncio.Future[tuple[bool, bytes]]] = {}
        self._port: Any = None
        self._receiver: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def index(self) -> int:
        """Number of the replica."""
        return self.member.index

    async def call_first(self, id: str, caller: str, method: str, args: tuple, kwargs: dict) -> Any:
        """Runs an endpoint on rank 0 and returns its value."""
        if self.load > 1 and not any(map(is_large, (*args, *kwargs.values()))):
            packed = pack((args, kwargs))
            if len(packed) < FRAME_BYTES:
                return await self._call_in_frame(id, caller, method, packed)
        return await self._answered(id, self._first.invoke.call_one(id, caller, method, args, kwargs))

    async def call_all(self, id: str, caller: str, method: str, args: tuple, kwargs: dict) -> ValueMesh:
        """Runs an endpoint on every rank; a mesh of their values."""
        return await self._answered(id, self._all.invoke.call(id, caller, method, args, kwargs))

    async def call_peers(self, id: str, caller: str, method: str, args: tuple, kwargs: dict) -> ValueMesh:
        """The same for a call of the actor's own ranks: it belongs to one that has its place already."""
        return await self._answered(id, self._all.invoke_peer.call(id, caller, method, args, kwargs))

    async def call_any(self, id: str, caller: str, method: str, args: tuple, kwargs: dict) -> Any:
        """Runs an endpoint on one rank of Monarch's choice."""
        return await self._answered(id, self._all.invoke.choose(id, caller, method, args, kwargs))

    async def _answered(self, id: str, call: Awaitable[T]) -> T:
        """The answer, what the endpoint raised, or LaneLost. A call that is given up is cancelled."""
        try:
            return await call
        except asyncio.CancelledError:
            self._in_background(self._cancel(id))
            raise
        except ActorError as error:
            await self._check_all_alive()
            raise error.exception from None
        except SupervisionError as error:
            raise LaneLost(cause_of_death(error)) from None

    async def _check_all_alive(self) -> None:
        """An error of one rank may only tell that another has died ("connection closed by peer"): raises
        LaneLost then."""
        if self.member.num_procs > 1:
            try:
                await self._all.probe.call()
            except (SupervisionError, ActorError) as error:
                raise LaneLost(cause_of_death(error)) from None

    async def _call_in_frame(self, id: str, caller: str, method: str, packed: bytes) -> Any:
        future = self._answers[id] = asyncio.get_running_loop().create_future()
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._outbox.append((id, caller, method, packed))
        try:
            ok, answer = await future
        except asyncio.CancelledError:
            self._in_background(self._cancel(id))
            raise
        finally:
            self._answers.pop(id, None)
        if not ok:
            await self._check_all_alive()
            raise unpack(answer)
        return unpack(answer)

    def _end_turn(self) -> None:
        """Sends what has gathered, in messages of bounded size."""
        outbox, self._outbox = self._outbox, []
        if self._port is None:
            self._port, receiver = Channel.open()
            self._receiver = asyncio.ensure_future(self._receive(receiver))
        while outbox:
            frame, size = [], 0
            while outbox and size < FRAME_BYTES:
                frame.append(outbox.pop(0))
                size += len(frame[-1][3])
            self._in_background(self._send(frame))

    async def _send(self, frame: list[tuple[str, str, str, bytes]]) -> None:
        """Answers come through the port; this call lasts until the last of them, to know of the end."""
        try:
            await self._first.serve_frame.call_one(self._port, frame)
        except Exception as error:  # whatever it is, those who wait must hear of it
            for id, *_ in frame:
                future = self._answers.get(id)
                if future is not None and not future.done():
                    future.set_exception(LaneLost(cause_of_death(error)))

    async def _receive(self, receiver: Any) -> None:
        while True:
            for id, ok, packed in await receiver.recv():
                future = self._answers.get(id)
                if future is not None and not future.done():
                    future.set_result((ok, packed))

    async def _cancel(self, id: str) -> None:
        with contextlib.suppress(SupervisionError, ActorError):  # nothing is left to cancel
            await self._all.cancel.call(id)

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """No call is in flight and none will come."""
        if self._receiver is not None:
            self._receiver.cancel()


def cause_of_death(error: object) -> str:
    """What Monarch's report, which runs over many lines, says of how the process ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = ("killed", "sig=", "exit", "stopped", "timeout")
    telling = [line for line in lines if any(word in line.lower() for word in words)]
    return (telling or lines or [type(error).__name__])[-1][:300]
