"""Call: one request to an actor, from the moment it is made to its answer, over all its attempts."""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

_serial = itertools.count(1)
_process = f"{os.getpid()}.{time.time_ns():x}"


def new_call_id() -> str:
    """Different from every other in the job."""
    return f"{_process}.{next(_serial)}"


@dataclass(slots=True)
class Outgoing:
    """A call that this process waits for."""

    id: str
    parent: str | None  # the call that is served here and made this one; None: no endpoint did
    task: str  # name of the asyncio task that waits
    service: str  # whom it was made to
    method: str
    since: float  # time.time() when it was made
    replica: int | None = None  # where it runs; None while it waits for a replica
    pid: int | None = None  # of the process where it runs (of rank 0)
    attempt: int = 1


@dataclass(slots=True)
class Incoming:
    """An endpoint that runs in this process."""

    id: str
    caller: str  # "generator[1]", or "root/NAME OF THE TASK"
    method: str
    since: float  # time.time() when it began
    task: "asyncio.Task[object]"


class Ledger:
    """Every call that this process waits for or serves, and how much has been done. Read from any thread."""

    def __init__(self) -> None:
        self.actor = "root"  # "generator[1]", with ".2" behind it for rank 2 of several
        self.outgoing: dict[str, Outgoing] = {}
        self.incoming: dict[str, Incoming] = {}
        self.num_moves = 0  # grows whenever something has been done here

    def moved(self) -> None:
        """Something was done; a run in which nothing moves for long has stalled."""
        self.num_moves += 1


ledger = Ledger()
"""This process's own."""

_serving: ContextVar[str | None] = ContextVar("forge_call", default=None)


def call_id() -> str | None:
    """The id of the call that the running endpoint serves; None outside of an endpoint.

    A call that is repeated because its replica was lost has the same id: an actor that keeps a journal can
    tell by it that the work is done already, and answer again.
    """
    return _serving.get()


@contextlib.contextmanager
def serving(id: str) -> Iterator[None]:
    """Inside the block the call of this id is the one that is being served."""
    token = _serving.set(id)
    try:
        yield
    finally:
        _serving.reset(token)


class waiting:
    """A new call that this task waits for as long as the block lasts."""

    __slots__ = ("_call",)

    def __init__(self, service: str, method: str) -> None:
        task = asyncio.current_task()
        name = task.get_name() if task is not None else "main"
        self._call = Outgoing(new_call_id(), _serving.get(), name, service, method, time.time())

    def __enter__(self) -> Outgoing:
        ledger.outgoing[self._call.id] = self._call
        return self._call

    def __exit__(self, *_: object) -> None:
        del ledger.outgoing[self._call.id]
        ledger.moved()
