"""[1] Rows of a dataset, epoch after epoch, in an order that seed and epoch decide."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Row = Mapping[str, Any]  # column -> value


@dataclass(frozen=True, slots=True)
class Position:
    """How far a dataset has been read: `index` rows of this epoch. With the seed, all its state."""

    epoch: int = 0
    index: int = 0


class RowSource(Protocol):
    """Where rows come from."""

    num_rows: int | None  # None: a stream, not known

    def rows(self, start: Position) -> Iterator[Row]:
        """The rest of an epoch from a position on; the same rows in the same order each time it is asked."""
        ...


class Table(Protocol):
    """Rows that can be had by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Row: ...


class IndexedRows:
    """A table of which each epoch is another permutation."""

    def __init__(self, table: Table, seed: int):
        self._table = table
        self._seed = seed
        self.num_rows: int | None = len(table)

    def rows(self, start: Position) -> Iterator[Row]:
        order = list(range(len(self._table)))
        random.Random(f"{self._seed}/{start.epoch}").shuffle(order)
        return (self._table[number] for number in order[start.index :])


class EndlessRows:
    """One row after the other, for ever; at the end of an epoch the next begins."""

    def __init__(self, source: RowSource, position: Position | None = None):
        self.source = source
        self.position = position or Position()
        self._rest = source.rows(self.position)

    def __next__(self) -> Row:
        try:
            row = next(self._rest)
        except StopIteration:
            self.position = Position(self.position.epoch + 1)
            self._rest = self.source.rows(self.position)
            # An epoch without rows is a broken source, not the end: there is none.
            row = next(self._rest, None)
            if row is None:
                raise RuntimeError(f"epoch {self.position.epoch} of the dataset has no rows") from None
        self.position = Position(self.position.epoch, self.position.index + 1)
        return row
