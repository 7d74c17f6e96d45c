"""JSONLSink: a file with one JSON object a step."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path


class JSONLSink:
    """Writes `{"step": 1, "time": seconds since 1970, "reward/mean": 0.5, ...}`, one line a step, flushed.

    An earlier file of that name is replaced, unless it is to be continued. NaN and infinity are written as
    NaN and Infinity, which Python's json reads.
    """

    def __init__(self, path: Path, *, go_on: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a" if go_on else "w", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def rewind(path: Path, step: int) -> None:
    """Takes back the lines of all later steps, and one that a killed run left half written; lines ascend by
    step. The file is cut and never written anew, so that a kill loses nothing; it may be open to go on."""
    if not path.exists():
        return
    size = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                os.truncate(path, size)
                return
            size += len(line)
