"""The registry without processes: versions, holds, retiring, failures, and who should have pushed."""

import dataclasses
import os

import pytest

from forge.errors import ForgeError, WeightsMissing
from forge.weights.keys import PartKey
from forge.weights.process import Process
from forge.weights.registry import HOLD_S, Reader, Registry, StoredPart

HERE = Process.this()
GONE = dataclasses.replace(HERE, started="1")  # its pid is another process's now
FAR = Process("elsewhere", 4711, "1")


def begin(registry: Registry, version: int, rank: int = 0, world_size: int = 1, writer=HERE) -> PartKey:
    return registry.begin(version, rank, world_size, "the trainer", writer)


def store(registry: Registry, key: PartKey, volume: str = "host#0", now: float = 0.0) -> None:
    registry.publish(StoredPart(key, volume, b""), now)


def publish(registry: Registry, version: int, *volumes: str, now: float = 0.0) -> None:
    """As many ranks as volumes."""
    for rank, volume in enumerate(volumes):
        store(registry, begin(registry, version, rank, len(volumes)), volume, now)


def hold(registry: Registry, version: int, process: Process, now: float = 0.0) -> Reader:
    found = registry.find(version)
    assert found is not None
    reader = Reader(process, 0)
    registry.hold(found, reader, now)
    return reader


def retire(registry: Registry, version: int) -> None:
    found = registry.start_retiring(version)
    assert found is not None
    registry.end(found)


def test_a_version_is_there_when_all_ranks_have_published() -> None:
    registry = Registry()
    second = begin(registry, 5, rank=1, world_size=2)
    first = begin(registry, 5, rank=0, world_size=2)
    store(registry, second)
    assert registry.find(5) is None and registry.unfinished() == [5] and not registry.complete()
    store(registry, first)
    found = registry.find(5)
    assert found is not None and set(found.parts) == {0, 1}
    assert registry.complete() == [5] and not registry.unfinished()


def test_a_part_is_claimed_once() -> None:
    registry = Registry()
    key = begin(registry, 5, rank=1, world_size=2)
    with pytest.raises(ForgeError, match="version 5 .* already published by rank 1 of 2"):
        begin(registry, 5, rank=1, world_size=2)
    with pytest.raises(ForgeError, match="already published"):
        begin(registry, 5, rank=0, world_size=4)
    store(registry, key)
    with pytest.raises(ForgeError, match="already published"):
        begin(registry, 5, rank=1, world_size=2)


def test_a_version_that_was_killed_on_the_way_can_be_pushed_again_after_it_is_retired() -> None:
    registry = Registry()
    old = begin(registry, 5, rank=0, world_size=2)
    begin(registry, 5, rank=1, world_size=2, writer=GONE)
    retiring = registry.start_retiring(5)
    assert retiring is not None and retiring.prefixes[0] == old.prefix
    with pytest.raises(ForgeError, match="is being retired"):
        begin(registry, 5)
    with pytest.raises(WeightsMissing, match="is being retired"):
        store(registry, old)
    registry.end(retiring)
    new = begin(registry, 5)
    assert new.arena(0) != old.arena(0)  # keys of TorchStore are not written twice
    with pytest.raises(WeightsMissing, match="retired while rank 0 published it"):
        store(registry, old)
    assert registry.find(5) is None  # it still comes
    store(registry, new)
    assert registry.complete() == [5]


def test_who_should_have_pushed_is_named() -> None:
    registry = Registry()
    assert "no rank of the trainer has begun to publish it (nothing was" in registry.missing(3, 1.5, now=0)
    registry.publish(StoredPart(registry.begin(2, 0, 1, "critic", HERE), "v", b""), now=10.0)
    message = registry.missing(3, 1.5, now=14.0)
    assert message.startswith("version 3 of the weights isn't in the store after 1.5 s: no rank of critic")
    assert "complete versions: 2; the last was 2, published 4 s ago" in message
    store(registry, begin(registry, 3, rank=1, world_size=4))
    begin(registry, 3, rank=0, world_size=4)
    begin(registry, 3, rank=2, world_size=4, writer=GONE)
    message = registry.missing(3, 1.5, now=14.0)
    assert (
        f"of the trainer's 4 ranks these have not published their part: 0 (process {os.getpid()}), "
        f"2 (its process {os.getpid()} is gone), 3 (complete versions: 2;" in message
    )


def test_a_failed_push_is_told_at_once_and_blocks_its_version_until_that_is_retired() -> None:
    registry = Registry()
    first, second = (begin(registry, 5, rank, world_size=2) for rank in range(2))
    store(registry, first)
    assert registry.fail(second, "OSError: disk full")
    assert not registry.fail(second, "again")
    why = "the push of the trainer's rank 1 failed: OSError: disk full"
    with pytest.raises(WeightsMissing, match=f"version 5 .*{why}"):
        registry.find(5)
    with pytest.raises(WeightsMissing, match=why):
        store(registry, second)
    with pytest.raises(ForgeError, match=f"{why}: retire it first"):
        begin(registry, 5)
    assert registry.unfinished() == [5] and not registry.complete()
    retire(registry, 5)
    publish(registry, 5, "v")
    assert registry.complete() == [5]


def test_a_part_that_is_stored_stays_when_its_rank_only_missed_the_answer() -> None:
    registry = Registry()
    key = begin(registry, 5)
    store(registry, key)
    assert registry.fail(key, "CancelledError: ") is None
    assert registry.complete() == [5]


def test_the_end_of_a_version_that_was_lost_is_not_that_of_the_same_number_pushed_again() -> None:
    registry = Registry()
    publish(registry, 5, "a")
    hold(registry, 5, HERE)
    old = registry.start_retiring(5)
    assert old is not None
    registry.lose("a", "its process is gone")
    publish(registry, 5, "b")
    assert not registry.has(old) and not registry.readers(old, now=0.0)
    registry.end(old)
    new = registry.find(5)
    assert new is not None and not set(new.prefixes) & set(old.prefixes)


def test_what_is_being_retired_or_was_retired_is_refused_at_once() -> None:
    registry = Registry()
    publish(registry, 5, "v")
    retiring = registry.start_retiring(5)
    assert retiring is not None and registry.start_retiring(6) is None
    with pytest.raises(WeightsMissing, match="version 5 of the weights is being retired"):
        registry.find(5)
    assert registry.unfinished() == [5] and not registry.complete()
    registry.end(retiring)
    with pytest.raises(WeightsMissing, match="version 5 of the weights was retired"):
        registry.find(5)
    publish(registry, 5, "v")
    assert registry.find(5) is not None


def test_a_hold_ends_when_its_reader_lets_go_or_dies() -> None:
    registry = Registry()
    publish(registry, 5, "v")
    alive, _dead = hold(registry, 5, HERE), hold(registry, 5, GONE)
    found = registry.start_retiring(5)
    assert found is not None
    assert registry.readers(found, now=1e9) == [alive]  # however long it takes
    assert registry.let_go(5, alive) is None
    assert registry.readers(found, now=1e9) == []
    assert registry.let_go(5, alive) == "version 5 of the weights was retired meanwhile"


def test_the_hold_of_a_reader_on_another_host_expires_unless_it_is_renewed() -> None:
    registry = Registry()
    publish(registry, 5, "v")
    reader, found = hold(registry, 5, FAR, now=100.0), registry.find(5)
    assert found is not None
    assert registry.readers(found, now=100.0 + HOLD_S) == [reader]
    registry.renew(5, reader, now=109.0)
    assert registry.readers(found, now=109.0 + HOLD_S) == [reader]
    assert registry.readers(found, now=109.1 + HOLD_S) == []
    registry.renew(5, reader, now=120.0)  # too late
    assert registry.let_go(5, reader) == "version 5 of the weights was retired meanwhile"


def test_with_a_volume_go_the_versions_of_which_it_holds_a_part() -> None:
    registry = Registry()
    publish(registry, 5, "a", "b")
    publish(registry, 6, "b", "b")
    reader = hold(registry, 5, HERE)
    store(registry, begin(registry, 7, rank=0, world_size=2), "a")
    late = begin(registry, 7, rank=1, world_size=2)
    assert [found.number for found in registry.lose("a", "its process is gone")] == [5, 7]
    for version in (5, 7):
        with pytest.raises(WeightsMissing, match=f"version {version} .*its process is gone"):
            registry.find(version)
    gone = registry.let_go(5, reader)
    assert gone is not None and "its process is gone" in gone
    assert registry.complete() == [6] and registry.unfinished() == [7]
    with pytest.raises(WeightsMissing, match="its process is gone"):
        store(registry, late)
    publish(registry, 5, "c")
    assert registry.complete() == [5, 6]


def test_a_lost_version_is_told_until_one_as_new_is_complete() -> None:
    registry = Registry()
    publish(registry, 5, "b")
    for version in (6, 7):
        publish(registry, version, "a")
    publish(registry, 8, "a")
    registry.start_retiring(8)
    begin(registry, 9)
    assert registry.newest_lost is None
    registry.lose("a", "its process is gone")
    assert registry.newest_lost == (7, "its process is gone"), "nobody misses what was being retired"
    publish(registry, 6, "b")
    assert registry.newest_lost == (7, "its process is gone")
    publish(registry, 7, "b")
    retire(registry, 7)
    assert registry.newest_lost is None


def test_nothing_grows_with_the_number_of_versions() -> None:
    registry = Registry()
    for version in range(3000):
        publish(registry, version, "v")
        retire(registry, version)
    assert len(registry._versions) == 0 and len(registry._gone) <= 1000
