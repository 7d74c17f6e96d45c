"""Stall: notices that nothing in a run moves any more, and answers SIGUSR1 with who waits for whom."""

import asyncio
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge.controller.why import collect_moves, explain

logger = logging.getLogger(__name__)

EXIT_CODE = 3  # of a run that has stalled
MAX_INTERVAL_S = 5.0
CLOSE_S = 5.0  # a thread that still asks processes which do not answer is left behind; it ends with this one


class StallWatch:
    """Calls `on_stall(text)` once, on a thread of its own, when nothing has moved for `timeout_s`.

    A move is a call that was done, in any process, or a process that came or went. A run in which nobody
    waits for a call and every event loop turns does not stall: its root is at work. Time in which this
    process did not run, because it was stopped or the machine slept, does not count. With timeout_s None it
    never calls.
    """

    def __init__(self, run_dir: Path, timeout_s: float | None, on_stall: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._known: dict[int, tuple[int, bool]] = {}  # pid: moves, and whether something waits there
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="forge-stall", daemon=True)
        if timeout_s is not None:
            self._thread.start()

    def close(self) -> None:
        """Ends the watch: `on_stall` is not called any more. May be called by `on_stall` itself."""
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def _watch(self) -> None:
        timeout_s = self._timeout_s
        assert timeout_s is not None
        interval_s = min(MAX_INTERVAL_S, timeout_s / 5)
        still_s, looked_at = 0.0, time.monotonic()
        while not self._closed.wait(interval_s):
            moved = self._look()
            now = time.monotonic()
            # More than this between two looks means that this process did not run.
            still_s = 0.0 if moved else still_s + min(now - looked_at, 2 * interval_s + 2)
            looked_at = now
            if still_s >= timeout_s:
                text = explain(self._run_dir, still_s)
                if not self._closed.is_set():
                    self._on_stall(text)
                return

    def _look(self) -> bool:
        """Whether anything has moved since the last look, or nothing has to."""
        seen: dict[int, tuple[int, bool]] = {}
        for report in collect_moves(self._run_dir):
            if report.problem is None:
                waits = bool(report.outgoing or report.served) or report.loop_blocked
                seen[report.pid] = (report.num_moves, waits)
            elif not report.is_gone:  # it says nothing new; as far as we know, it is where it was
                seen[report.pid] = self._known.get(report.pid, (0, True))
        moves = {pid: num for pid, (num, _) in seen.items()}
        moved = moves != {pid: num for pid, (num, _) in self._known.items()}
        self._known = seen
        return moved or not any(waits for _, waits in seen.values())


class SignalWatch:
    """Prints who waits for whom on stderr at each SIGUSR1. Made by `install_sigusr1`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        # A handler may interrupt itself; of all ways to wake a thread only this queue stands that.
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="forge-sigusr1", daemon=True)
        self._thread.start()
        self._previous: Any = signal.signal(signal.SIGUSR1, lambda *_: self._asked.put(True))

    def close(self) -> None:
        """Restores what SIGUSR1 did before. On the main thread only, as all of Python's signal functions."""
        signal.signal(signal.SIGUSR1, signal.SIG_DFL if self._previous is None else self._previous)
        self._asked.put(False)
        self._thread.join(CLOSE_S)

    def _answer(self) -> None:
        while self._asked.get():
            print(explain(self._run_dir), file=sys.stderr, flush=True)


def install_sigusr1(run_dir: Path) -> SignalWatch | None:
    """Handles SIGUSR1, beside asyncio's own handling of signals; None off the main thread, where it can't be.

    The handler runs as soon as the main thread runs Python code or its event loop; while it is inside of a
    long call of C, `forge why` answers and this does not.
    """
    if threading.current_thread() is not threading.main_thread():
        logger.info("SIGUSR1 is not handled: the run was not started on the main thread; use `forge why`")
        return None
    return SignalWatch(run_dir)


class Ending:
    """An `on_stall` that prints the graph and cancels the run's main task, so that the run closes in order.

    A process that is still there after `grace_s`, because its event loop does not turn or closing hangs too,
    is ended at once with EXIT_CODE; so must whoever runs the task when `has_stalled` is set.
    """

    def __init__(self, task: "asyncio.Task[Any]", grace_s: float = 30.0) -> None:
        self.has_stalled = False
        self._task = task
        self._loop = task.get_loop()
        self._grace_s = grace_s

    def __call__(self, text: str) -> None:
        self.has_stalled = True
        print(f"the run has stalled:\n{text}", file=sys.stderr, flush=True)
        last_resort = threading.Timer(self._grace_s, self._kill)
        last_resort.daemon = True
        last_resort.start()
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: the run ends already
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _kill(self) -> None:
        print(f"the stalled run did not end within {self._grace_s:g} s: killed", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)
