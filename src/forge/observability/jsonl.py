"""JSONLSink: a file with one JSON object a step."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any


class JSONLSink:
    """Writes `{"step": 1, "time": seconds since 1970, "reward/mean": 0.5, ...}`, one line a step; each is on
    the disk when it is logged.

    An earlier file of that name is replaced, unless it is to be continued. NaN and infinity are written as
    NaN and Infinity, which Python's json reads.
    """

    def __init__(self, path: Path, *, go_on: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a" if go_on else "w", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **values}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # before a checkpoint of this step is

    def close(self) -> None:
        self._file.close()


def rewind(path: Path, step: int) -> None:
    """Takes back the lines of all later steps, and from the first that a kill, or the end of a machine, left
    half written; lines ascend by step. The file is cut and never written anew, so that a kill loses nothing;
    it may be open to go on."""
    if path.exists():
        kept = takewhile(lambda line: line[0]["step"] <= step, _lines(path))
        os.truncate(path, sum(size for _, size in kept))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines, up to one that is not whole; none where there is no file."""
    return [row for row, _ in _lines(path)] if path.exists() else []


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each with its size in bytes, up to one that is not whole."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError:  # no JSON, or not even text
                return
            yield row, len(line)
