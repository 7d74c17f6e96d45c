"""Arena: one flat piece of memory that processes of a host share, freed when the last of them lets go."""

import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass
from threading import Lock
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

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.fd}"


class Arena(mmap.mmap):
    """An anonymous memory file (memfd), mapped.

    Nothing of it has a name in the file system, so nothing is left behind however its processes end. Every
    process that uses an arena holds a shared lock on it (flock), which the kernel drops with the last page
    of the mapping, also when the process is killed. So an arena that its owner can lock exclusively is read
    by nobody, and its pages, whose first touch costs ten times a copy, may be written again.
    """

    fd: int

    def __new__(cls, fd: int, nbytes: int, access: int) -> Self:
        arena = super().__new__(cls, fd, nbytes, access=access)
        arena.fd = fd
        _by_address[arena.bytes().data_ptr()] = arena
        return arena

    @classmethod
    def create(cls, nbytes: int) -> Self:
        """A new arena, written by this process, its owner, and locked by it until `release`."""
        fd = os.memfd_create("forge-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.flock(fd, fcntl.LOCK_EX)
            return cls(fd, nbytes, mmap.ACCESS_WRITE)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, reference: ArenaReference) -> Self:
        """Maps an arena of another process. What is written to this mapping stays private (copy on write).

        Raises WeightsMissing when the arena was freed, is being written again, or may not be opened.
        """
        try:
            fd = os.open(reference.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _freed(reference) from None
        except PermissionError as error:
            raise WeightsMissing(f"the shared memory of process {reference.pid}: {error}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino != reference.inode:
                raise BlockingIOError
            return cls(fd, reference.nbytes, mmap.ACCESS_COPY)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise _freed(reference) from None
            raise

    def attach_again(self, reference: ArenaReference) -> None:
        """Locks an arena that this process let go of, and still maps, as `attach` does."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.stat(reference.path).st_ino != reference.inode:
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):
            raise _freed(reference) from None

    def let_go(self) -> None:
        """This process reads it no more, though it still maps it: the owner may write it again."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def is_freed(self) -> bool:
        """Whether nobody uses an arena any more that this process has let go of, its owner included."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.let_go()
        return True

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
        """Locks the arena for its owner to write, unless another process reads it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self.fd, fcntl.LOCK_SH)  # which the attempt has dropped
            return False
        return True

    def release(self) -> None:
        """It is written: others may attach. The owner keeps a shared lock until it frees the arena."""
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def __del__(self, close=os.close) -> None:
        if hasattr(self, "fd"):
            close(self.fd)


def _freed(reference: ArenaReference) -> WeightsMissing:
    return WeightsMissing(f"the shared memory of process {reference.pid} was freed before it was read")


_by_address: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()


class ArenaPool:
    """The arenas one process has published from; hands out those again that nobody reads any more.

    For any threads: two pushes may pack at once.
    """

    def __init__(self) -> None:
        self._arenas: list[Arena] = []
        self._lock = Lock()

    def take(self, nbytes: int) -> Arena:
        """An arena of at least `nbytes`, locked for writing. Frees all others that nobody reads."""
        with self._lock:
            idle = [arena for arena in self._arenas if arena.try_lock()]
            self._arenas = [arena for arena in self._arenas if arena not in idle]
        return next((arena for arena in idle if len(arena) >= nbytes), None) or Arena.create(nbytes)

    def give_back(self, arena: Arena) -> None:
        """Takes back an arena that was released; it is handed out again once nobody else maps it."""
        with self._lock:
            self._arenas.append(arena)
