"""Journal: records that outlive the process that wrote them."""

import os
import pickle
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cloudpickle

# A journal shorter than this is not worth a rewrite; beyond, it may grow so many times between two.
SMALL_BYTES = 4 * 2**20
GROWTH = 4

_HEAD = struct.Struct("<QI")  # bytes and CRC-32 of the pickled record behind it


class Journal:
    """A file of pickled records, in order, for an actor that must not forget when its process is killed.

    A record is kept once `append` has returned, whatever happens to the process; the machine may not crash
    (nothing is synced to the disk). A record that was cut off by the kill is dropped when the file is opened.

    The usual way: `setup` opens it and applies `records` in order; an endpoint appends a record and applies
    it, without an await in between; once the journal `has_outgrown` itself, it is rewritten as what still
    counts.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._new = path.with_name(f"{path.name}.new")
        self._new.unlink(missing_ok=True)  # a rewrite that a kill cut off
        self.records: list[Any] = []  # those found in the file; clear it when they are applied
        end = 0
        with open(path, "ab+") as file:
            file.seek(0)
            data = file.read()
            while (found := _read(data, end)) is not None:
                record, end = found
                self.records.append(record)
            file.truncate(end)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the actor lives
        self.num_bytes = end
        self._num_bytes_rewritten = 0

    @property
    def has_outgrown(self) -> bool:
        """Whether it is several times as long as after the last rewrite, and long enough to matter."""
        return self.num_bytes > max(SMALL_BYTES, GROWTH * self._num_bytes_rewritten)

    def append(self, record: Any) -> None:
        """Adds one record. When that fails (a full disk), the records before it stay as they are."""
        framed = _frame(record)
        view = memoryview(framed)
        try:
            while view:
                view = view[self._file.write(view) :]
        except BaseException:  # what came behind half a record could not be read again
            self._file.truncate(self.num_bytes)
            raise
        self.num_bytes += len(framed)

    def rewrite(self, records: Iterable[Any]) -> None:
        """Replaces all records at once: a kill leaves either the old ones or the new."""
        with open(self._new, "wb") as file:
            num_bytes = sum(file.write(_frame(record)) for record in records)
        file = open(self._new, "ab", buffering=0)  # noqa: SIM115 - takes the place of the old one
        os.replace(self._new, self._path)
        self._file.close()
        self._file = file
        self.num_bytes = self._num_bytes_rewritten = num_bytes

    def close(self) -> None:
        """Closes the file; the records stay."""
        self._file.close()


def _frame(record: Any) -> bytes:
    # cloudpickle: an argument of a call may be of a class that only the caller's own script has
    body = cloudpickle.dumps(record)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def _read(data: bytes, start: int) -> tuple[Any, int] | None:
    """The record that starts there and where it ends; None when it is not there or not whole."""
    if len(data) < start + _HEAD.size:
        return None
    size, checksum = _HEAD.unpack_from(data, start)
    end = start + _HEAD.size + size
    body = data[start + _HEAD.size : end]
    if not size or len(body) < size or zlib.crc32(body) != checksum:  # no pickle is empty
        return None
    return pickle.loads(body), end
