"""[1] Rows by number: 0, 1, 2, ... through all epochs."""

from collections.abc import Iterator

from forge.data.rows import Position, Row, RowSource
from forge.errors import DatasetError

_NUM_REMEMBERED = 1024  # rows: more than are asked for out of their order


class NumberedRows:
    """The rows of a source by number. Which row a number stands for depends on the source's seed alone, not
    on what was asked before.

    An epoch of a stream is as long as its first one, which is not known until that has been read to its end;
    who knows it from before says so, and what lies before a number is then read within its epoch only. Going
    back by more than the last rows reads a stream again.
    """

    def __init__(self, source: RowSource, epoch_length: int | None = None) -> None:
        self.epoch_length = epoch_length if source.num_rows is None else source.num_rows
        self._source = source
        self._recent: dict[int, Row] = {}
        self._epoch = 0  # that is open
        self._next = 0  # number of the row that `_rest` has next
        self._rest: Iterator[Row] | None = None

    def __getitem__(self, number: int) -> Row:
        """Raises DatasetError for a source without a row, and for one that has lost some since its start."""
        while number not in self._recent:
            self._open(number)
            assert self._rest is not None
            row = next(self._rest, None)
            if row is None:
                self._end_epoch()
            else:
                self._remember(row)
        return self._recent[number]

    def _open(self, number: int) -> None:
        """Lets the rows of the number's epoch be read from it on, or from further ahead."""
        if self.epoch_length == 0:
            raise DatasetError("the dataset has no rows")
        if self.epoch_length is None:
            epoch, index, start = 0, 0, 0
        else:
            (epoch, index), start = divmod(number, self.epoch_length), number
        if self._rest is None or number < self._next or epoch != self._epoch:
            self._rest = self._source.rows(Position(epoch, index))
            self._epoch, self._next = epoch, start

    def _end_epoch(self) -> None:
        if self.epoch_length is not None:
            num_rows = self._next - self._epoch * self.epoch_length
            raise DatasetError(
                f"epoch {self._epoch} of the dataset ended after {num_rows} rows, and an epoch had "
                f"{self.epoch_length}: the data must not change while it is trained on"
            )
        self.epoch_length = self._next

    def _remember(self, row: Row) -> None:
        self._recent[self._next] = row
        self._next += 1
        if len(self._recent) > _NUM_REMEMBERED:
            del self._recent[next(iter(self._recent))]
