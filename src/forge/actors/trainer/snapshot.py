"""Snapshots: each rank's training state in a file, for the processes that take the place of killed ones."""

import errno
import logging
import os
import pickle
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_NAME = re.compile(r"snapshot-(\d+)\.rank(\d+)of(\d+)(\.partial)?")


class Snapshots:
    """One rank's part of each, in a folder that all ranks share; a snapshot counts once every part is there.

    A snapshot is named by a number that grows. Raw bytes behind a small header, since pickled tensors take
    twice the time and stop all other threads while they are written.
    """

    def __init__(self, folder: Path, *, rank: int, world_size: int) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._writing: Future[None] | None = None
        self._warned = False
        folder.mkdir(parents=True, exist_ok=True)

    def newest(self) -> int:
        """The newest snapshot of which all ranks' parts are written; 0: there is none."""
        parts = Counter(number for number, _, partial, _ in self._files() if not partial)
        return max((number for number, n in parts.items() if n == self._world_size), default=0)

    def begin(self, number: int, facts: Any, tensors: Sequence[Tensor]) -> None:
        """Writes this rank's part in another thread; the tensors must not change before `wait` returns.

        A disk without room is logged once: the trainer then starts from an older snapshot.
        """
        self.wait()
        whole = self.newest()
        for older, rank, _, path in self._files():
            if rank == self._rank and older != whole:  # some rank could not write its part
                path.unlink(missing_ok=True)
        header = pickle.dumps((facts, [tuple(t.shape) for t in tensors]))
        self._writing = self._thread.submit(self._write, self._path(number), header, tensors)

    def wait(self) -> None:
        """Returns when nothing is being written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    @torch.no_grad()
    def read(self, number: int, tensors: Sequence[Tensor]) -> Any:
        """Fills the tensors, which must be those of `begin` in its order; returns the facts beside them."""
        path = self._path(number)
        with path.open("rb") as file:
            facts, shapes = pickle.load(file)
            assert shapes == [tuple(t.shape) for t in tensors], f"{path} is of another model"
            for tensor in tensors:
                stored = torch.empty(tensor.shape, dtype=tensor.dtype)
                got, wanted = file.readinto(_bytes(stored)), stored.nbytes
                assert got == wanted, f"{path} ends early: {got} of {wanted} bytes"
                tensor.copy_(stored)
        return facts

    def drop_older(self, number: int) -> None:
        """Deletes all ranks' parts of the snapshots before this one."""
        for older, _, _, path in self._files():
            if older < number:
                path.unlink(missing_ok=True)

    def _write(self, path: Path, header: bytes, tensors: Sequence[Tensor]) -> None:
        partial = path.with_name(f"{path.name}.partial")
        nbytes = len(header) + sum(tensor.nbytes for tensor in tensors)
        try:
            if shutil.disk_usage(self._folder).free < nbytes * self._world_size:  # all write at once
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with partial.open("wb") as file:
                file.write(header)
                for tensor in tensors:
                    file.write(_bytes(tensor.cpu().contiguous()))
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            self._warn(error, nbytes)

    def _warn(self, error: OSError, nbytes: int) -> None:
        if not self._warned:
            logger.warning(
                "no snapshot of the trainer's state could be written to %s (%.3f GB): %s. Training goes on, "
                "but should its process be killed, all steps since the last snapshot are repeated. Set "
                "TMPDIR to a folder with more room, or training.snapshot_every to 0 to do without snapshots",
                self._folder,
                nbytes * self._world_size / 1e9,
                error.strerror,
            )
        self._warned = True

    def _path(self, number: int) -> Path:
        return self._folder / f"snapshot-{number}.rank{self._rank}of{self._world_size}"

    def _files(self) -> Iterator[tuple[int, int, bool, Path]]:
        """(number, rank, whether it is partial, path) of each."""
        for name in os.listdir(self._folder):
            if (match := _NAME.fullmatch(name)) and int(match[3]) == self._world_size:
                yield int(match[1]), int(match[2]), match[4] is not None, self._folder / name


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
