"""A reader's mappings: used again, never with what it once wrote, and dropped when the arena is freed."""

import gc
import os
import time

import pytest
import torch
from torch import Tensor

from forge.errors import WeightsMissing
from forge.weights import attachments
from forge.weights.arena import Arena, ArenaPool
from forge.weights.attachments import Attachments

NBYTES = 5 * 4096


def written(pool: ArenaPool, value: int) -> Arena:
    """The arena of the next version, all bytes `value`."""
    arena = pool.take(NBYTES)
    arena.bytes().fill_(value)
    arena.release()
    pool.give_back(arena)
    return arena


def kernel_can_tell_what_was_written() -> bool:
    """Whether it has PAGEMAP_SCAN, without which no mapping is kept."""
    arena = written(ArenaPool(), 0)
    return not attachments._is_written_here(Arena.attach(arena.reference()))


def num_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("forge-weights" in line for line in maps)


@pytest.mark.skipif(not kernel_can_tell_what_was_written(), reason="needs PAGEMAP_SCAN, Linux 6.7")
def test_an_arena_that_is_written_again_is_read_through_the_same_mapping() -> None:
    pool, reader = ArenaPool(), Attachments()
    arena = written(pool, 1)
    first = reader.attach(arena.reference())
    assert first.eq(1).all()
    address, mapped = first.data_ptr(), num_mappings()
    del first
    assert num_mappings() == mapped
    assert written(pool, 2) is arena
    second = reader.attach(arena.reference())
    assert second.data_ptr() == address and second.eq(2).all()


def test_what_a_reader_wrote_is_gone_when_the_arena_brings_another_version() -> None:
    pool, reader = ArenaPool(), Attachments()
    arena = written(pool, 1)
    tensor = reader.attach(arena.reference())
    tensor[-1] = 9
    assert arena.bytes().eq(1).all()
    del tensor
    written(pool, 2)
    assert reader.attach(arena.reference()).eq(2).all()


def test_an_arena_is_not_written_again_while_a_view_of_it_lives() -> None:
    pool, reader = ArenaPool(), Attachments()
    arena = written(pool, 1)
    view: Tensor | None = reader.attach(arena.reference())[8:16].view(torch.float32)
    assert view is not None and Arena.of(view) is not None
    assert written(pool, 2) is not arena
    view = None
    assert written(pool, 3) is arena


def test_two_readings_of_one_arena_at_once_are_both_locked() -> None:
    pool, reader = ArenaPool(), Attachments()
    arena = written(pool, 1)
    first = reader.attach(arena.reference())
    second = reader.attach(arena.reference())
    del first
    assert written(pool, 2) is not arena and second.eq(1).all()


def test_an_arena_that_is_being_written_is_not_read_through_an_old_mapping() -> None:
    pool, reader = ArenaPool(), Attachments()
    arena = written(pool, 1)
    reference = arena.reference()
    reader.attach(reference)
    assert pool.take(NBYTES) is arena
    with pytest.raises(WeightsMissing, match="freed"):
        reader.attach(reference)


def test_mappings_of_freed_arenas_are_dropped() -> None:
    gc.collect()  # what earlier tests have left open
    maps, descriptors = num_mappings(), len(os.listdir("/proc/self/fd"))
    reader = Attachments()
    for value in range(5):
        pool = ArenaPool()  # the last one's arena is freed with it
        reader.attach(written(pool, value).reference())
    del pool
    assert num_mappings() <= maps + 3  # the last arena and its idle mapping, and one not yet looked for
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 3


@pytest.mark.skipif(not kernel_can_tell_what_was_written(), reason="needs PAGEMAP_SCAN, Linux 6.7")
def test_an_arena_that_was_freed_since_it_was_last_read_is_dropped_with_the_next_reading() -> None:
    gc.collect()
    maps, reader = num_mappings(), Attachments()
    pool = ArenaPool()
    reader.attach(written(pool, 1).reference())
    while reader._dropped or reader._lock.locked():  # what the thread has found is not freed yet
        time.sleep(0.001)
    del pool
    assert num_mappings() == maps + 1  # the idle mapping
    other = ArenaPool()
    tensor = reader.attach(written(other, 2).reference())
    assert num_mappings() == maps + 2 and tensor.eq(2).all()  # of the publisher's and of the reader's
