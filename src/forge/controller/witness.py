"""Witness: a thread in every process that tells what it waits for, also when its event loop is stuck."""

import asyncio
import contextlib
import os
import socket
import threading
import time
from pathlib import Path

from forge.controller.call import ledger
from forge.controller.process_report import ProcessReport, ServedCall, TaskStack, WaitingCall, to_json
from forge.controller.stacks import Snapshot
from forge.errors import ForgeError

RUN_DIR_VARIABLE = "FORGE_RUN_DIR"
MAX_PATH_BYTES = 107  # of a Unix socket, on Linux
LOOP_ANSWERS_S = 0.2  # an event loop that takes longer is called blocked
TICK_S = 1.0
STACKS, MOVES = "stacks", "moves"  # what can be asked for: everything, or everything but the stacks


class Witness:
    """Answers each connection to `<run_dir>/<pid>.sock` with one ProcessReport. Ends with its process."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop | None) -> None:
        self._path = path
        self._loop = loop
        self._loop_thread = _thread_of(loop)
        self._num_moves = ledger.num_moves
        self._moved_at = time.monotonic()
        self._closing = False
        self._socket = _listen(path)
        self._thread = threading.Thread(target=self._run, name="forge-witness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops answering and removes the socket."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * TICK_S)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closing:
            self._note_moves()
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # closed by close()
                return
            # Whoever asked has gone, or what was read has changed while it was read: no answer is an answer.
            with connection, contextlib.suppress(OSError, RuntimeError):
                connection.settimeout(TICK_S)
                with_stacks = connection.recv(64).decode(errors="replace").strip() == STACKS
                connection.sendall(to_json(self.report(with_stacks)).encode())

    def report(self, with_stacks: bool = True) -> ProcessReport:
        """This process now. From any thread but the event loop's."""
        blocked = self._loop_is_blocked()
        snapshot = Snapshot() if with_stacks else None
        self._note_moves()
        # dict.copy() is one step of the interpreter: the event loop can't change the dict meanwhile.
        incoming = list(ledger.incoming.copy().values())
        serving = {call.task for call in incoming}
        return ProcessReport(
            pid=os.getpid(),
            actor=ledger.actor,
            at=time.time(),
            num_moves=self._num_moves,
            idle_s=time.monotonic() - self._moved_at,
            loop_blocked=blocked,
            outgoing=tuple(
                WaitingCall(c.id, c.parent, c.task, c.service, c.method, c.since, c.replica, c.pid, c.attempt)
                for c in ledger.outgoing.copy().values()
            ),
            served=tuple(
                ServedCall(
                    c.id,
                    c.caller,
                    c.method,
                    c.since,
                    snapshot is not None and snapshot.is_executing(c.task),
                    snapshot.await_chain(c.task) if snapshot is not None else (),
                )
                for c in incoming
            ),
            tasks=self._tasks(snapshot, serving) if snapshot is not None else (),
            threads=snapshot.threads(self._loop_thread) if snapshot is not None else (),
        )

    def _tasks(self, snapshot: Snapshot, serving: set["asyncio.Task[object]"]) -> tuple[TaskStack, ...]:
        """Tasks that serve no call; none should they change too fast (asyncio retries a thousand times)."""
        with contextlib.suppress(RuntimeError):
            return tuple(
                TaskStack(task.get_name(), snapshot.await_chain(task, into_tasks=False))
                for task in (asyncio.all_tasks(self._loop) if self._loop is not None else ())
                if task not in serving
            )
        return ()

    def _note_moves(self) -> None:
        if ledger.num_moves != self._num_moves:
            self._num_moves = ledger.num_moves
            self._moved_at = time.monotonic()

    def _loop_is_blocked(self) -> bool:
        answered = threading.Event()

        def answer() -> None:
            self._loop_thread = threading.get_ident()
            answered.set()

        try:
            if self._loop is None or not self._loop.is_running():
                return False
            self._loop.call_soon_threadsafe(answer)
        except RuntimeError:  # it has just been closed
            return False
        return not answered.wait(LOOP_ANSWERS_S)


def start_witness(run_dir: Path, loop: asyncio.AbstractEventLoop | None) -> Witness:
    """Lets this process be asked what it waits for. Its endpoints or tasks run on `loop`."""
    path = run_dir / f"{os.getpid()}.sock"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ForgeError(
            f"a Unix socket's path has at most {MAX_PATH_BYTES} bytes, {path} has {len(os.fsencode(path))}: "
            "set TMPDIR to a folder with a shorter path"
        )
    _own_folder(run_dir)
    path.unlink(missing_ok=True)  # of an earlier process with this pid
    return Witness(path, loop)


def _thread_of(loop: asyncio.AbstractEventLoop | None) -> int | None:
    """This thread, when it runs the loop. Else the loop tells, once it is asked and not blocked."""
    try:
        return threading.get_ident() if asyncio.get_running_loop() is loop else None
    except RuntimeError:
        return None


def _own_folder(folder: Path) -> None:
    """Makes it for this user alone; in /tmp another one may have been faster."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not folder.is_dir() or folder.is_symlink() or found.st_uid != os.getuid():
        raise ForgeError(f"{folder} belongs to another user or is a link, so it can't be used: remove it")
    folder.chmod(0o700)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(8)
    listener.settimeout(TICK_S)
    return listener
