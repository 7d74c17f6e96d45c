"""Attachments: arenas of other processes that this one reads, kept mapped for when they are written again.

To map an arena anew costs more than to read it: the kernel enters every page into this process's table, and
takes it out again. Publishers use their arenas by turns, so a mapping that no tensor needs any more is kept,
without a lock, until the arena brings another version. One that its publisher has freed is unmapped when this
process next maps an arena, or drops a tensor.
"""

import fcntl
import struct
import weakref
from collections import deque
from queue import SimpleQueue
from threading import Lock, Thread

import numpy as np
import torch
from torch import Tensor

from forge.weights.arena import Arena, ArenaReference

_PAGEMAP_SCAN = 0xC0606610  # ioctl of /proc/self/pagemap, Linux 6.7; these are flags of it:
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4


class Attachments:
    """Of one process."""

    def __init__(self) -> None:
        self._idle: dict[int, Arena] = {}  # by inode
        self._dropped: deque[tuple[int, Arena]] = deque()  # by tensors, and not looked at yet
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._lock = Lock()
        self._tidier: Thread | None = None

    def attach(self, reference: ArenaReference) -> Tensor:
        """The arena's bytes, [nbytes] uint8, as `Arena.attach` maps them: what is written stays private.

        The arena is locked against being written again as long as a tensor lives that shares this memory.
        Raises WeightsMissing as `Arena.attach` does.
        """
        with self._lock:
            if self._tidier is None:
                self._tidier = Thread(target=self._tidy_always, name="attachments", daemon=True)
                self._tidier.start()
            self._tidy()
            arena = self._idle.pop(reference.inode, None)
        if arena is not None:
            arena.attach_again(reference)
        else:
            arena = Arena.attach(reference)
        memory = np.frombuffer(arena, dtype=np.uint8)
        weakref.finalize(memory, self._drop, reference.inode, arena).atexit = False
        return torch.from_numpy(memory)

    def _drop(self, inode: int, arena: Arena) -> None:
        """May be called by the garbage collector, in the middle of anything: takes no lock of Python's."""
        arena.let_go()
        self._dropped.append((inode, arena))
        self._bell.put(None)

    def _tidy_always(self) -> None:
        """Whoever drops the last tensor need not wait for it, nor who attaches next."""
        while True:
            self._bell.get()
            with self._lock:
                self._tidy()

    def _tidy(self) -> None:
        """Keeps what can be used again of what was dropped, and lets go of what was freed."""
        while self._dropped:
            inode, arena = self._dropped.popleft()
            if not _is_written_here(arena):
                self._idle[inode] = arena
        self._idle = {inode: arena for inode, arena in self._idle.items() if not arena.is_freed()}


def _is_written_here(arena: Arena) -> bool:
    """Whether this process has written to its mapping, pages of which are then copies of its own.

    True where the kernel can't tell.
    """
    start = arena.bytes().data_ptr()
    found = np.zeros(3, np.uint64)  # room for one range of pages: one is enough
    query = (96, 0, start, start + len(arena), 0, found.ctypes.data, 1, 1)
    wanted = (_FILE, _FILE, _PRESENT | _SWAPPED, _PRESENT)  # there, and not of the file
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            return fcntl.ioctl(pagemap, _PAGEMAP_SCAN, bytearray(struct.pack("12Q", *query, *wanted))) > 0
    except OSError:
        return True
