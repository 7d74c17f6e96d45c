"""JSONLSink: a file with one JSON object a step."""

import json
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
    """Takes back the lines of all later steps, and one that a killed run left half written. A file that is
    open to be continued may stay open."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        path.write_text("".join(kept), encoding="utf-8")
