"""Call: one request to an actor, from the moment it is made to its answer, over all its attempts."""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

_serial = itertools.count(1)
_PROCESS = f"{os.getpid()}.{time.time_ns():x}"


def _new_id() -> str:
    return f"{_PROCESS}.{next(_serial)}"


@dataclass(frozen=True, slots=True)
class CallInfo:
    """What travels with a call. The id is the same for every attempt, so that an actor knows a repetition."""

    id: str
    caller: str  # who asked: "generator[1]" or, in the root process, the name of the asyncio task


_current: ContextVar[CallInfo | None] = ContextVar("forge_call", default=None)


def call_id() -> str | None:
    """The id of the call that the running endpoint serves; None outside of an endpoint.

    A call that is repeated because its replica was lost has the same id: an actor that keeps a journal can
    tell by it that the work is done already, and answer again.
    """
    info = _current.get()
    return None if info is None else info.id


@contextlib.contextmanager
def serving(info: CallInfo) -> Iterator[None]:
    """Inside the block this call is the one that is being served."""
    token = _current.set(info)
    try:
        yield
    finally:
        _current.reset(token)
