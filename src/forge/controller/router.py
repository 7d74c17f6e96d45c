"""Router: which replica serves the next call."""

from collections.abc import Sequence
from typing import Protocol


class Candidate(Protocol):
    """A replica that can take a call now."""

    @property
    def index(self) -> int: ...
    @property
    def load(self) -> int:
        """Calls of this process that are in flight there."""
        ...


class Router(Protocol):
    """Chooses a replica; your own goes to `options(router=...)`. It must be picklable, as handles travel."""

    def choose(self, replicas: Sequence[Candidate]) -> int:
        """Position in `replicas`, which is not empty and holds only such as can take a call."""
        ...


class LeastLoadedRouter:
    """The replica with the fewest calls in flight; the one used longest ago among equals."""

    def __init__(self) -> None:
        self._turn: dict[int, int] = {}
        self._calls = 0

    def choose(self, replicas: Sequence[Candidate]) -> int:
        """See `Router`."""
        position = min(
            range(len(replicas)), key=lambda i: (replicas[i].load, self._turn.get(replicas[i].index, 0))
        )
        self._calls += 1
        self._turn[replicas[position].index] = self._calls
        return position
