"""Router: which replica serves the next call."""

from collections.abc import Sequence

from forge.controller.replica import Replica


class LeastLoadedRouter:
    """The replica with the fewest calls in flight; the one used longest ago among equals."""

    def __init__(self) -> None:
        self._turn: dict[int, int] = {}
        self._calls = 0

    def choose(self, replicas: Sequence[Replica]) -> Replica:
        """`replicas` is not empty; all of them can serve."""
        chosen = min(replicas, key=lambda r: (r.load, self._turn.get(r.index, 0)))
        self._calls += 1
        self._turn[chosen.index] = self._calls
        return chosen
