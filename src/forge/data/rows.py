"""[1] Rows of a dataset, epoch after epoch, in an order that seed and epoch decide."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
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

    def where(self, keep: Callable[[Row], bool]) -> "RowSource":
        """The same without the rows that are not to be kept: they count in no position either."""
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
        self._epoch_and_order: tuple[int, list[int]] | None = None  # the last one that was asked for
        self.num_rows: int | None = len(table)

    def rows(self, start: Position) -> Iterator[Row]:
        order = self._order(start.epoch)
        return (self._table[order[index]] for index in range(start.index, len(order)))

    def where(self, keep: Callable[[Row], bool]) -> "IndexedRows":
        kept = [number for number in range(len(self._table)) if keep(self._table[number])]
        return IndexedRows(_Selection(self._table, kept), self._seed)

    def _order(self, epoch: int) -> list[int]:
        if self._epoch_and_order is None or self._epoch_and_order[0] != epoch:
            order = list(range(len(self._table)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._epoch_and_order = epoch, order
        return self._epoch_and_order[1]


class FilteredRows:
    """A stream without some of its rows, which are passed over as they come."""

    num_rows: int | None = None

    def __init__(self, source: RowSource, keep: Callable[[Row], bool]):
        self._source = source
        self._keep = keep

    def rows(self, start: Position) -> Iterator[Row]:
        return islice(filter(self._keep, self._source.rows(Position(start.epoch))), start.index, None)

    def where(self, keep: Callable[[Row], bool]) -> "FilteredRows":
        return FilteredRows(self, keep)


class _Selection:
    """Some rows of a table."""

    def __init__(self, table: Table, numbers: Sequence[int]):
        self._table = table
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> Row:
        return self._table[self._numbers[number]]


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
