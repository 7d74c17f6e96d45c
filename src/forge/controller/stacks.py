"""Stacks: where every thread is, and what every task awaits, read from beside them without a stop."""

import asyncio
import concurrent.futures
import concurrent.futures.thread
import contextlib
import gc
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any

from forge.controller.process_report import Frame, Stack, ThreadStack

MAX_DEPTH = 200  # of an await chain
# Functions of asyncio that hold what they wait for in a local variable, and await something else.
_HELD = {"wait_for": "fut", "_wait": "fs"}


class Snapshot:
    """The frames of all threads at one moment."""

    def __init__(self) -> None:
        self._threads = {ident: list(_outward(top))[::-1] for ident, top in sys._current_frames().items()}

    def threads(self, loop_thread: int | None) -> tuple[ThreadStack, ...]:
        """The stack of every thread but the one that asks."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return tuple(
            ThreadStack(names.get(ident, f"thread {ident}"), ident == loop_thread, _frames(frames))
            for ident, frames in self._threads.items()
            if ident != threading.get_ident()
        )

    def is_executing(self, task: "asyncio.Task[Any]") -> bool:
        """Whether a thread is inside of the task's code, rather than the task awaiting something."""
        frame = _frame_of(task.get_coro())
        return frame is not None and self._from(frame) is not None

    def await_chain(self, task: "asyncio.Task[Any]", *, into_tasks: bool = True) -> Stack:
        """Each coroutine that the task is suspended in, outermost first, down to what is really awaited.

        Goes on in the thread that an executor runs for it, and with `into_tasks` in the task it awaits: the
        first unfinished one of several.
        """
        frames: list[FrameType] = []
        awaited: Any = task.get_coro()
        for _ in range(MAX_DEPTH):
            if awaited is None:
                break
            if isinstance(awaited, asyncio.Future):
                frames += self._executed_for(awaited)
                awaited = _behind(awaited, into_tasks)
                continue
            frame = _frame_of(awaited)
            if frame is None:
                awaited = _inside(awaited)
                continue
            running = self._from(frame)
            if running is not None:
                frames += running
                break
            frames.append(frame)
            awaited = _held_by(frame) or _awaited_by(awaited)
        return _frames(frames)

    def _from(self, frame: FrameType) -> list[FrameType] | None:
        """The frames of a thread from this one on; None when no thread is in it."""
        for frames in self._threads.values():
            if frame in frames:
                return frames[frames.index(frame) :]
        return None

    def _executed_for(self, future: "asyncio.Future[Any]") -> list[FrameType]:
        """What a thread of an executor does to fulfil the future."""
        wanted = set(_executor_futures(future))
        for frames in self._threads.values() if wanted else ():
            for i, frame in enumerate(frames):
                if frame.f_code is concurrent.futures.thread._WorkItem.run.__code__:
                    item = frame.f_locals.get("self")
                    if item is not None and item.future in wanted:
                        return frames[i + 1 :]
        return []


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames(frames: Iterable[FrameType]) -> Stack:
    return tuple(
        Frame(f.f_code.co_filename, f.f_lineno or 0, f.f_code.co_qualname.rpartition("<locals>.")[2])
        for f in frames
    )


def _frame_of(awaitable: Any) -> FrameType | None:
    """The frame of a coroutine or generator; None for one that is done, and for everything else."""
    if isinstance(awaitable, CoroutineType):
        return awaitable.cr_frame
    if isinstance(awaitable, GeneratorType):
        return awaitable.gi_frame
    return awaitable.ag_frame if isinstance(awaitable, AsyncGeneratorType) else None


def _awaited_by(awaitable: Any) -> Any:
    if isinstance(awaitable, CoroutineType):
        return awaitable.cr_await
    return awaitable.gi_yieldfrom if isinstance(awaitable, GeneratorType) else awaitable.ag_await


def _inside(wrapper: Any) -> Any:
    """What an object of C awaits that has no attribute for it: a future's iterator, `anext(...)`, ..."""
    kinds = (CoroutineType, GeneratorType, AsyncGeneratorType, asyncio.Future)
    if isinstance(wrapper, kinds):  # finished meanwhile
        return None
    return next((found for found in gc.get_referents(wrapper) if isinstance(found, kinds)), None)


def _held_by(frame: FrameType) -> Any:
    name = _HELD.get(frame.f_code.co_name)
    if name is None or frame.f_code.co_filename != asyncio.tasks.__file__:
        return None
    held = frame.f_locals.get(name)
    return held if isinstance(held, asyncio.Future) else _first_unfinished(list(held or ()))


def _behind(future: "asyncio.Future[Any]", into_tasks: bool) -> Any:
    """What fulfils a future, as far as asyncio can tell: a task's coroutine, or a member of `gather`."""
    if isinstance(future, asyncio.Task):
        return future.get_coro() if into_tasks else None
    return _first_unfinished(getattr(future, "_children", ()))


def _first_unfinished(futures: Sequence["asyncio.Future[Any]"]) -> "asyncio.Future[Any] | None":
    return next((future for future in futures if not future.done()), None)


def _executor_futures(future: "asyncio.Future[Any]") -> Iterator["concurrent.futures.Future[Any]"]:
    """The executor's own future that `run_in_executor` chained to this one: its callback holds it."""
    for callback, *_ in getattr(future, "_callbacks", None) or ():
        for cell in getattr(callback, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty cell
                if isinstance(cell.cell_contents, concurrent.futures.Future):
                    yield cell.cell_contents
