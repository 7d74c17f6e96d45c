"""The loss and the metrics of a batch, put together from its micro-batches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forge.actors.trainer.micro_batch import Shares


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


def metrics_of_step(
    gathered: Sequence[tuple[Shares, dict[str, float]]], token_means: frozenset[str]
) -> dict[str, float]:
    """The metrics of an optimizer step from those of the batches that were gathered for it.

    Each batch counts by what it has of the sequences (or tokens) of all, `num_tokens` is their sum. Those of
    a single batch stay as they are, to the bit.
    """
    total = sum(shares.total for shares, _ in gathered)
    num_tokens = sum(shares.num_tokens for shares, _ in gathered)
    tally = Tally(token_means)
    for shares, metrics in gathered:
        tally.add(0.0, metrics, shares.total / total, shares.num_tokens / num_tokens)
    return {**tally.metrics, "num_tokens": float(num_tokens)}
