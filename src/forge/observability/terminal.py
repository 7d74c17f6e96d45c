"""CapturedTerminal: takes whatever this process and its children write to the terminal, line by line."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import TextIO

MARK = b"\0caught up\0"  # put into the pipe to learn when all that was written before it has been read


class CapturedTerminal:
    """From creation to `release`, lines written to stdout and stderr (where they are a terminal) go to
    `on_line` instead, also those of processes started meanwhile, which inherit the pipe. `screen` is the
    real terminal. After `release`, processes that still hold the pipe are passed through to it.
    """

    def __init__(self) -> None:
        self._captured = [fd for fd in (1, 2) if os.isatty(fd)]
        assert self._captured, "there is no terminal to capture"
        self._flush()
        self._saved = [os.dup(fd) for fd in self._captured]
        self.screen: TextIO = os.fdopen(os.dup(self._saved[0]), "w", encoding="utf-8", errors="replace")
        self._read_end, self._write_end = os.pipe()
        for fd in self._captured:
            os.dup2(self._write_end, fd)
        self._on_line: Callable[[str], None] = self._pass_through
        self._caught_up = threading.Event()
        self._open = True
        threading.Thread(target=self._read, name="terminal", daemon=True).start()
        atexit.register(self._end)

    def send_lines_to(self, on_line: Callable[[str], None]) -> None:
        """`on_line` is called in a thread of its own, once for each line, without the line end."""
        self._on_line = on_line

    def release(self) -> None:
        """Gives the terminal back once the lines written so far were handed on. May be called again."""
        if not self._open:
            return
        self._open = False
        self._flush()
        for saved, fd in zip(self._saved, self._captured, strict=True):
            os.dup2(saved, fd)
        self._catch_up()
        self._on_line = self._pass_through

    def _end(self) -> None:
        self.release()
        self._catch_up()

    def _catch_up(self) -> None:
        """Returns when everything that stands in the pipe now has been handed on."""
        self._caught_up.clear()
        os.write(self._write_end, MARK)
        self._caught_up.wait(timeout=2.0)

    def _read(self) -> None:
        rest = b""
        while chunk := os.read(self._read_end, 1 << 16):
            rest += chunk
            caught_up = MARK in rest
            *lines, rest = rest.replace(MARK, b"\n").split(b"\n")
            for line in lines:
                self._hand_on(line)
            if caught_up:
                self._caught_up.set()

    def _hand_on(self, line: bytes) -> None:
        # what a carriage return overwrote is not shown: progress bars redraw themselves that way
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        if text:
            self._on_line(text)

    def _pass_through(self, line: str) -> None:
        self.screen.write(line + "\n")
        self.screen.flush()

    @staticmethod
    def _flush() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
