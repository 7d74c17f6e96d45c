"""An asyncio event loop whose clock jumps to the next timer when nothing is left to do: hours in seconds."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Everything runs as in any event loop, in the same order; `time()` moves only while all tasks sleep."""

    def __init__(self) -> None:
        super().__init__(_NoWaiting(self))
        self._now = 0.0

    def time(self) -> float:
        """Seconds since the loop began, as the tasks see it."""
        return self._now

    def jump(self, seconds: float | None) -> None:
        """What the selector does instead of waiting so long."""
        if seconds is None:
            raise RuntimeError("every task waits for another one: nothing will ever happen again")
        self._now += seconds


class _NoWaiting(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if not ready and timeout != 0:
            self._loop.jump(timeout)
        return ready


def run(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
