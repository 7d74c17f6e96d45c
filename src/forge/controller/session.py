"""Sessions: which replica of a service the calls of a task stick to."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

from forge.controller.lane import Lane


class Session:
    """Sticks to the replica that its first call got, until that is gone."""

    def __init__(self) -> None:
        self.lane: Lane | None = None


_NONE: Mapping[str, Session] = MappingProxyType({})
_sessions: ContextVar[Mapping[str, Session]] = ContextVar("forge_sessions", default=_NONE)


@contextmanager
def open_session(service: str) -> Iterator[Session]:
    """Inside the block, and in tasks started there, calls to this service belong to a new session."""
    session = Session()
    token = _sessions.set({**_sessions.get(), service: session})
    try:
        yield session
    finally:
        _sessions.reset(token)


def current_session(service: str) -> Session | None:
    """The innermost session of this service that is open here."""
    return _sessions.get().get(service)
