"""StopRequest: what a run that is asked to stop may still do, in the time it is taken to be given."""

import asyncio
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

SAVE_GRACE_S = 20.0
"""Slurm and Kubernetes kill a job 30 s after their SIGTERM; to stop the machines takes up to 10."""

SAME_REQUEST_S = 1.0
"""Launchers forward a signal that the whole process group has had already."""


class StopRequest:
    """`with StopRequest() as stop:` Ctrl-C and SIGTERM only set `asked`, so that the step under way can end
    and be saved. A second one cancels the task within, and so does the end of `grace_s` after a SIGTERM."""

    def __init__(self, grace_s: float = SAVE_GRACE_S) -> None:
        self.asked = False
        self._grace_s = grace_s
        self._asked_at = 0.0
        self._why = ""  # nothing was saved
        self._deadline: asyncio.TimerHandle | None = None
        # A request ends the last of them; None: a block that is held, for which it waits
        self._work: list[asyncio.Task[None] | None] = []

    def __enter__(self) -> Self:
        self._loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._task = task
        self._sigint = signal.getsignal(signal.SIGINT)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, self._sigint)
        self._loop.add_signal_handler(signal.SIGTERM, self._task.cancel)
        if self._why and isinstance(error, asyncio.CancelledError):
            print(f"not saved: {self._why}; earlier checkpoints stay", file=sys.stderr, flush=True)

    async def unless_asked(self, work: Coroutine[Any, Any, None]) -> bool:
        """Awaits `work`, which a request to stop cancels; whether it was done."""
        if self.asked:
            work.close()
            return False
        task = asyncio.create_task(work)
        outer = asyncio.current_task()
        assert outer is not None
        self._work.append(task)
        try:
            await task
        except asyncio.CancelledError:
            if outer.cancelling() or not self.asked:
                raise
            return False
        finally:
            self._work.remove(task)
        return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """A request ends the work around this block only when the block is done; work within it, at once.
        One that came before lets no block begin."""
        if self.asked:
            raise asyncio.CancelledError
        self._work.append(None)
        try:
            yield
        finally:
            self._work.pop()
            if self.asked:
                self._end_work()

    def _on_signal(self, number: int) -> None:
        if self.asked and self._loop.time() - self._asked_at > SAME_REQUEST_S:
            self._give_up("asked to stop once more")
            return
        how_long = "; once more to stop at once"
        if number == signal.SIGTERM and self._deadline is None:
            why = f"the step and its checkpoint took more than {self._grace_s:g} s"
            self._deadline = self._loop.call_later(self._grace_s, self._give_up, why)
            how_long = f", or in {self._grace_s:g} s"
        if self.asked:
            return
        self.asked, self._asked_at = True, self._loop.time()
        print(f"stopping when this step is done and saved{how_long}", file=sys.stderr, flush=True)
        self._end_work()

    def _end_work(self) -> None:
        if self._work and (work := self._work[-1]) is not None:
            work.cancel()

    def _give_up(self, why: str) -> None:
        self._why = why
        self._task.cancel()
