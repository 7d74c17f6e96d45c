"""Metrics: every process records facts, the root process drains and merges them once a step.

How values of one name are reduced is said by the name: `num_*` are summed, `*_max` and `*_min` keep the
largest and the smallest, everything else is the mean over all recorded values, whichever process they
come from.
"""

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stat:
    """What is kept of the values recorded under one name."""

    count: int
    total: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, value: float) -> "Stat":
        return cls(1, value, value, value)

    def __add__(self, other: "Stat") -> "Stat":
        return Stat(
            self.count + other.count,
            self.total + other.total,
            min(self.smallest, other.smallest),
            max(self.largest, other.largest),
        )

    def reduce(self, name: str) -> float:
        """One number, by the rule that `name` ("group/name") asks for."""
        last = name.rpartition("/")[2]
        if last.startswith("num_"):
            return self.total
        if math.isnan(self.total):  # a comparison may have lost it
            return self.total
        if last.endswith("_max"):
            return self.largest
        if last.endswith("_min"):
            return self.smallest
        return self.total / self.count


_lock = threading.Lock()
_stats: dict[str, Stat] = {}


def record(group: str, /, **values: float) -> None:
    """Adds values to this process's metrics under "group/name". Safe in any thread."""
    new = {f"{group}/{name}": Stat.of(float(value)) for name, value in values.items()}
    with _lock:
        _add(new)


def drain() -> dict[str, Stat]:
    """What was recorded in this process since the last call."""
    with _lock:
        drained = dict(_stats)
        _stats.clear()
    return drained


def put_back(stats: Mapping[str, Stat]) -> None:
    """Adds what was drained, or was recorded by an earlier process, to what is recorded in this one."""
    with _lock:
        _add(stats)


def combine(parts: Iterable[Mapping[str, Stat]]) -> dict[str, Stat]:
    """What several processes drained -> one Stat a name, sorted by name."""
    combined: dict[str, Stat] = {}
    for part in parts:
        for name, stat in part.items():
            combined[name] = combined[name] + stat if name in combined else stat
    return dict(sorted(combined.items()))


def merge(parts: Iterable[Mapping[str, Stat]]) -> dict[str, float]:
    """What several processes drained -> one number a name, sorted by name."""
    return {name: stat.reduce(name) for name, stat in combine(parts).items()}


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Records the seconds that the block took as "time/NAME_s"; a block that raises records nothing."""
    start = time.perf_counter()
    yield
    record("time", **{f"{name}_s": time.perf_counter() - start})


def _add(new: Mapping[str, Stat]) -> None:
    for name, stat in new.items():
        _stats[name] = _stats[name] + stat if name in _stats else stat
