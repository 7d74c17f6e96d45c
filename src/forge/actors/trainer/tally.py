"""The loss and the metrics of a batch, put together from its micro-batches."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Weighted sums: with weights that sum to one over all micro-batches of all ranks, means of the batch.

    Metrics named `*_max` and `*_min` keep the largest and the smallest value instead.
    """

    token_means: frozenset[str] = frozenset()  # metrics that are means over tokens, whatever the loss is
    losses: list[float] = field(default_factory=list)  # one a micro-batch, weighted
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, loss: float, metrics: dict[str, float], weight: float, token_weight: float) -> None:
        """One more micro-batch: its share of what the loss averages over, and of the tokens. Shares of 0 say
        that it had no targets."""
        self.losses.append(loss * weight)
        for name, value in metrics.items():
            kept = name.endswith(("_max", "_min"))
            share = token_weight if name in self.token_means else weight
            self._put(name, value if kept else share * value)

    @classmethod
    def merge(cls, tallies: Iterable["Tally"]) -> "Tally":
        """Those of several ranks as one."""
        merged = cls()
        for tally in tallies:
            merged.losses += tally.losses
            for name, value in tally.metrics.items():
                merged._put(name, value)
        return merged

    def _put(self, name: str, value: float) -> None:
        old = self.metrics.get(name)
        if old is None:
            self.metrics[name] = value
        elif name.endswith("_max"):
            self.metrics[name] = max(old, value)
        elif name.endswith("_min"):
            self.metrics[name] = min(old, value)
        else:
            self.metrics[name] = old + value
