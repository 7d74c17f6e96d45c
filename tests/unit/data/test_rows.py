"""Epochs, order and position."""

from itertools import islice

from forge.data.rows import EndlessRows, IndexedRows, Position

ROWS = [{"n": number} for number in range(50)]


def take(rows: EndlessRows, count: int) -> list[int]:
    return [next(rows)["n"] for _ in range(count)]


def test_each_epoch_holds_every_row_once_in_another_order() -> None:
    rows = EndlessRows(IndexedRows(ROWS, seed=0))
    first, second = take(rows, 50), take(rows, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50)) != first


def test_the_order_is_that_of_the_seed() -> None:
    def order(seed: int) -> list[int]:
        return take(EndlessRows(IndexedRows(ROWS, seed)), 120)

    assert order(3) == order(3) != order(4)


def test_seeds_do_not_share_epochs() -> None:
    epochs = {
        (seed, epoch): tuple(row["n"] for row in IndexedRows(ROWS, seed).rows(Position(epoch)))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(set(epochs.values())) == 16


def test_reading_goes_on_from_a_position() -> None:
    rows = EndlessRows(IndexedRows(ROWS, seed=7))
    take(rows, 73)
    assert rows.position == Position(epoch=1, index=23)
    resumed = EndlessRows(IndexedRows(ROWS, seed=7), rows.position)
    assert take(resumed, 100) == take(rows, 100)


def test_the_position_at_the_end_of_an_epoch_resumes_too() -> None:
    rows = EndlessRows(IndexedRows(ROWS, seed=7))
    take(rows, 50)
    assert take(EndlessRows(IndexedRows(ROWS, seed=7), rows.position), 60) == take(rows, 60)


def test_a_source_can_be_asked_again() -> None:
    source = IndexedRows(ROWS, seed=1)
    assert list(source.rows(Position(2))) == list(source.rows(Position(2)))
    assert list(source.rows(Position(2, 10))) == list(islice(source.rows(Position(2)), 10, None))
