"""Arena: one flat piece of memory that processes of a host share, freed when the last of them lets go."""

import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from forge.errors import WeightsMissing


@dataclass(frozen=True, slots=True)
class ArenaReference:
    """Where another process of this host finds an arena: a descriptor of a process that holds it open."""

    pid: int
    fd: int
    inode: int  # descriptors are reused: the inode tells whether `fd` is still the same arena
    nbytes: int


class Arena(mmap.mmap):
    """An anonymous memory file (memfd), mapped.

    Nothing of it has a name in the file system, so nothing is left behind however its processes end. Every
    process that maps an arena holds a shared lock on it (flock), which the kernel drops with the last page
    of the mapping, also when the process is killed. So an arena that can be locked exclusively is read by
    nobody, and its pages, whose first touch costs five times a copy, may be written again.
    """

    fd: int

    def __new__(cls, fd: int, nbytes: int, access: int) -> Self:
        arena = super().__new__(cls, fd, nbytes, access=access)
        arena.fd = fd
        _by_address[arena.bytes().data_ptr()] = arena
        return arena

    @classmethod
    def create(cls, nbytes: int) -> Self:
        """A new arena, written by this process and locked by it until `release`."""
        fd = os.memfd_create("forge-weights", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return cls(fd, nbytes, mmap.ACCESS_WRITE)

    @classmethod
    def attach(cls, reference: ArenaReference) -> Self:
        """Maps an arena of another process. What is written to this mapping stays private (copy on write).

        Raises WeightsMissing when the arena was freed or is being written again.
        """
        gone = f"the shared memory of process {reference.pid} was freed before it was read"
        try:
            fd = os.open(f"/proc/{reference.pid}/fd/{reference.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise WeightsMissing(gone) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino != reference.inode:
                raise BlockingIOError
            return cls(fd, reference.nbytes, mmap.ACCESS_COPY)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise WeightsMissing(gone) from None
            raise

    @classmethod
    def of(cls, tensor: Tensor) -> "Arena | None":
        """The arena whose memory `tensor` is a view of, None for any other tensor."""
        return _by_address.get(tensor.untyped_storage().data_ptr())

    def bytes(self) -> Tensor:
        """The whole arena, [nbytes] uint8. The arena lives as long as any tensor made from this one."""
        return torch.frombuffer(self, dtype=torch.uint8)

    def reference(self) -> ArenaReference:
        return ArenaReference(os.getpid(), self.fd, os.fstat(self.fd).st_ino, len(self))

    def try_lock(self) -> bool:
        """Locks the arena for writing, unless another process still maps it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Ends the lock for writing: it is written, others may attach."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def __del__(self, close=os.close) -> None:
        if hasattr(self, "fd"):
            close(self.fd)


_by_address: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()


class ArenaPool:
    """The arenas one process has published from; hands out those again that nobody reads any more."""

    def __init__(self) -> None:
        self._arenas: list[Arena] = []

    def take(self, nbytes: int) -> Arena:
        """An arena of at least `nbytes`, locked for writing. Frees all others that nobody reads."""
        idle = [arena for arena in self._arenas if arena.try_lock()]
        self._arenas = [arena for arena in self._arenas if arena not in idle]
        return next((arena for arena in idle if len(arena) >= nbytes), None) or Arena.create(nbytes)

    def give_back(self, arena: Arena) -> None:
        """Takes back an arena that was released; it is handed out again once nobody else maps it."""
        self._arenas.append(arena)
