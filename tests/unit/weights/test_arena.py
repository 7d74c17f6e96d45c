"""Arenas: bytes travel between processes, nothing is rewritten under a reader, nothing is left behind."""

import gc
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from unittest.mock import Mock

import pytest
import torch

from forge.errors import WeightsMissing
from forge.weights.arena import Arena, ArenaPool


def filled(pool: ArenaPool, nbytes: int, value: int) -> Arena:
    arena = pool.take(nbytes)
    arena.bytes().fill_(value)
    arena.release()
    return arena


def child_that_maps(arena: Arena) -> int:
    """Forks a process that attaches to the arena and waits to be killed; returns its id once it has."""
    reference = arena.reference()
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        mapped = Arena.attach(reference)
        os.write(told, mapped[:1])
        time.sleep(60)
        os._exit(0)
    assert os.read(ready, 1) == arena[:1]
    os.close(ready)
    os.close(told)
    return child


def end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_bytes_written_are_the_bytes_another_mapping_reads() -> None:
    arena = Arena.create(1 << 16)
    values = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)
    arena.bytes().copy_(values)
    arena.release()
    assert torch.equal(Arena.attach(arena.reference()).bytes(), values)


def test_a_readers_writes_stay_its_own() -> None:
    arena = filled(ArenaPool(), 4096, 7)
    reader = Arena.attach(arena.reference()).bytes()
    reader.fill_(1)
    assert arena.bytes().eq(7).all() and reader.eq(1).all()


def test_an_arena_is_found_by_any_view_and_no_other_tensor() -> None:
    arena = Arena.create(4096)
    view = arena.bytes()[128:256].view(torch.float32).view(8, 4)
    assert Arena.of(view) is arena
    assert Arena.of(torch.zeros(4)) is None


def test_a_view_keeps_the_mapping_and_the_last_one_frees_it() -> None:
    gc.collect()  # what earlier tests have left open
    before = open_descriptors()
    arena = filled(ArenaPool(), 4096, 3)
    view = arena.bytes()[10:20]
    del arena
    gc.collect()
    assert view.eq(3).all()
    assert open_descriptors() > before
    del view
    gc.collect()
    assert open_descriptors() == before


def test_an_arena_that_is_being_written_can_not_be_attached() -> None:
    arena = Arena.create(4096)
    with pytest.raises(WeightsMissing, match="freed"):
        Arena.attach(arena.reference())


def test_a_freed_arena_can_not_be_attached_even_when_its_descriptor_is_taken_again() -> None:
    arena = Arena.create(4096)
    arena.release()
    reference = arena.reference()
    del arena
    gc.collect()
    with pytest.raises(WeightsMissing, match="freed"):
        Arena.attach(reference)
    other = Arena.create(4096)
    other.release()
    assert other.reference().fd == reference.fd
    with pytest.raises(WeightsMissing, match="freed"):
        Arena.attach(reference)


def test_the_pool_hands_an_arena_out_again_when_nobody_reads_it() -> None:
    pool = ArenaPool()
    first = filled(pool, 4096, 1)
    pool.give_back(first)
    assert pool.take(4096) is first


def test_the_pool_leaves_an_arena_alone_while_another_process_maps_it() -> None:
    pool = ArenaPool()
    first = filled(pool, 4096, 1)
    child = child_that_maps(first)
    try:
        pool.give_back(first)
        second = filled(pool, 4096, 2)
        assert second is not first and first.bytes().eq(1).all()
        pool.give_back(second)
    finally:
        end(child)
    assert pool.take(4096) is first


def test_two_threads_never_get_the_same_arena() -> None:
    pool, num_arenas = ArenaPool(), 200
    for _ in range(num_arenas):
        arena = Arena.create(4096)
        arena.release()
        pool.give_back(arena)
    start = Barrier(2)

    def take(_: int) -> list[Arena]:
        start.wait()
        taken = []
        for _ in range(num_arenas):
            taken.append(pool.take(4096))
            extra = Arena.create(4096)
            extra.release()
            pool.give_back(extra)
        return taken

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(take, range(2))
    assert not {id(arena) for arena in first} & {id(arena) for arena in second}


def test_no_room_for_an_arena_leaves_no_descriptor_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()
    monkeypatch.setattr(os, "ftruncate", Mock(side_effect=OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        Arena.create(4096)
    assert open_descriptors() == before


def test_an_arena_that_may_not_be_opened_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.create(4096)
    monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError("not yours")))
    with pytest.raises(WeightsMissing, match=f"process {os.getpid()}: not yours"):
        Arena.attach(arena.reference())


def test_the_pool_frees_what_it_does_not_need() -> None:
    gc.collect()  # what earlier tests have left open
    before = open_descriptors()
    pool = ArenaPool()
    for arena in [filled(pool, 4096, value) for value in range(4)]:
        pool.give_back(arena)
    del arena
    kept = pool.take(4096)
    gc.collect()
    assert open_descriptors() == before + 2
    del kept
