"""Journal: records that outlive the process that wrote them."""

import os
import pickle
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_HEAD = struct.Struct("<QI")  # bytes and CRC-32 of the pickled record behind it


class Journal:
    """A file of pickled records, in order, for an actor that must not forget when its process is killed.

    A record is kept once `append` has returned, whatever happens to the process; the machine may not crash
    (nothing is synced to the disk). A record that was cut off by the kill is dropped when the file is opened.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.records: list[Any] = []  # those that were in the file when it was opened
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

    def append(self, record: Any) -> None:
        """Adds one record."""
        framed = _frame(record)
        view = memoryview(framed)
        while view:
            view = view[self._file.write(view) :]
        self.num_bytes += len(framed)

    def rewrite(self, records: Iterable[Any]) -> None:
        """Replaces all records at once: a kill leaves either the old ones or the new."""
        data = b"".join(_frame(record) for record in records)
        new = self._path.with_suffix(".new")
        new.write_bytes(data)
        os.replace(new, self._path)
        self._file.close()
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self.num_bytes = len(data)

    def close(self) -> None:
        """Closes the file; the records stay."""
        self._file.close()


def _frame(record: Any) -> bytes:
    body = pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def _read(data: bytes, start: int) -> tuple[Any, int] | None:
    """The record that starts there and where it ends; None when it is not there or not whole."""
    if len(data) < start + _HEAD.size:
        return None
    size, checksum = _HEAD.unpack_from(data, start)
    end = start + _HEAD.size + size
    body = data[start + _HEAD.size : end]
    if len(body) < size or zlib.crc32(body) != checksum:
        return None
    return pickle.loads(body), end
