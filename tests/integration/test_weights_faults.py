"""Weights that go wrong on their way: each fault is seen, nothing of it is served, and the run goes on."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import monarch.actor
import psutil
import pytest
import torch
import torch.distributed as dist
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge.errors import WeightsMismatch, WeightsMissing
from forge.weights import (
    Box,
    close_store,
    courier,
    fetch,
    fetch_shards,
    newest_lost,
    open_store,
    publish,
    retire,
    unfinished,
    versions,
)
from tests.integration.test_weights import arena_files
from tests.integration.weights_peers import Peers, differences, is_alive, make_model

Scenario = Callable[[Peers], Awaitable[None]]
Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Scenario], None]]:
    """Runs a scenario with a writer and two readers beside this process; all scenarios have the same."""
    monarch.actor.unhandled_fault_hook = lambda failure: None
    peers = Peers()

    async def start() -> None:
        await asyncio.gather(open_store(), peers.start("writer", "reader", "other"))

    async def stop() -> None:
        peers.stop()
        await close_store()

    with asyncio.Runner() as runner:
        runner.run(start())
        try:
            yield lambda scenario: runner.run(asyncio.wait_for(scenario(peers), 60))
        finally:
            runner.run(stop())


async def check_recovered(peers: Peers, version: int, seed: int) -> None:
    """The version is retired, pushed again, and read as it should be."""
    await asyncio.wait_for(retire(version), 5)
    assert version not in await versions() and version not in await unfinished()
    await peers.writer.publish.call_one(version, seed)
    found = await asyncio.gather(*(p.compare.call_one(version, seed) for p in (peers.reader, peers.other)))
    assert found == [[], []]
    await retire(version)
    assert not any(arena_files(volume) for volume in volume_processes(peers))


def family() -> list[int]:
    return [p.pid for p in (psutil.Process(), *psutil.Process().children(recursive=True)) if is_alive(p)]


def volume_processes(peers: Peers) -> list[int]:
    """The processes that are neither peers nor this one."""
    return [pid for pid in family() if pid not in (os.getpid(), *peers.pids.values())]


def flip_a_bit(tensor: Tensor) -> None:
    """In one arena that holds the tensor: all processes of the job share its memory."""
    wanted = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    places = [
        (path, Path(path).read_bytes().find(wanted)) for pid in family() for path in arena_files(pid).values()
    ]
    [(path, found), *_] = [place for place in places if place[1] >= 0]
    with open(path, "r+b") as file:
        file.seek(found + 5)
        [byte] = file.read(1)
        file.seek(found + 5)
        file.write(bytes([byte ^ 1]))


@contextmanager
def as_rank(rank: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """This process as one of two ranks, with what shards a tensor's first dimension."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        yield lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
    finally:
        dist.destroy_process_group()


async def publish_sharded(version: int, ranks: list[Change]) -> None:
    """The model of this seed, as ranks of two that each change what they publish."""
    for rank, change in enumerate(ranks):
        with as_rank(rank) as shard:
            sharded = {name: shard(t) for name, t in make_model(version).items() if t.dim()}
            await publish(version, change(sharded), rank=rank, world_size=2)


def as_it_is(model: dict[str, Any]) -> dict[str, Any]:
    return model


def test_a_flipped_bit_reaches_no_reader(run) -> None:
    async def scenario(peers: Peers) -> None:
        await peers.writer.publish.call_one(1, 1)
        flip_a_bit(make_model(1)["up"])
        for reader in (peers.reader, peers.other):
            with pytest.raises(ActorError) as caught:
                await reader.compare.call_one(1, 1)
            assert isinstance(caught.value.exception, WeightsMismatch)
            assert "version 1 of the weights is damaged: up: fingerprint" in str(caught.value.exception)
        box = Box((0, 3), (6, 4))  # of a part of a tensor only all readers together know
        halves = [await fetch_shards(1, {"up": Box((0, n), (6, 12))}) for n in (0, 12)]
        with pytest.raises(WeightsMismatch, match="up: fingerprint"):
            halves[0].manifest.prove([half.claims for half in halves])
        await fetch_shards(1, {"embed": Box((0, 0), (65, 16)), "up": box})  # what is whole is whole
        await check_recovered(peers, 1, 101)

    run(scenario)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: {n: t for n, t in model.items() if n != "up"}, "up: the boxes hold 72 of its 144"),
        (lambda model: {n.replace("norm", "nrom"): t for n, t in model.items()}, "norm: the boxes hold 4 of"),
    ],
    ids=["left out", "renamed"],
)
def test_a_tensor_that_one_rank_leaves_out_or_renames_is_named(run, change: Change, words: str) -> None:
    async def scenario(peers: Peers) -> None:
        await publish_sharded(2, [as_it_is, as_it_is])
        assert differences(await fetch(2), make_model(2)) == ["scalar"]
        await retire(2)
        await publish_sharded(2, [as_it_is, change])
        with pytest.raises(WeightsMismatch, match=f"version 2 of the weights is damaged: {words}"):
            await fetch(2)
        with pytest.raises(ActorError) as caught:
            await peers.reader.compare.call_one(2, 2)
        assert isinstance(caught.value.exception, WeightsMismatch)
        await check_recovered(peers, 2, 102)

    run(scenario)


def test_a_tensor_that_no_rank_has_is_named(run) -> None:
    async def scenario(peers: Peers) -> None:
        await peers.writer.publish.call_one(3, 3)
        with pytest.raises(WeightsMismatch, match="gate: the tests' trainer published no such tensor"):
            await fetch_shards(3, {"up": Box((0, 0), (6, 24)), "gate": Box((0, 0), (6, 24))})
        with pytest.raises(WeightsMismatch, match="up"):
            await fetch_shards(3, {"up": Box((4, 0), (6, 24))})
        await check_recovered(peers, 3, 103)

    run(scenario)


def test_half_a_version_is_not_served_and_the_missing_rank_is_named(run) -> None:
    async def scenario(peers: Peers) -> None:
        await publish_sharded(4, [as_it_is])
        with pytest.raises(WeightsMissing, match="of the trainer's 2 ranks .* not published their part: 1 "):
            await fetch(4, timeout_s=0.2)
        assert 4 in await unfinished() and 4 not in await versions()
        await check_recovered(peers, 4, 104)

    run(scenario)


def test_a_version_that_never_comes_is_missed_by_name(run) -> None:
    async def scenario(peers: Peers) -> None:
        await peers.writer.publish.call_one(5, 5)
        started = time.monotonic()
        with pytest.raises(WeightsMissing, match="version 6 .* no rank of the tests' trainer .*last was 5"):
            await fetch(6, timeout_s=0.5)
        assert 0.5 <= time.monotonic() - started < 2
        await retire(5)

    run(scenario)


def test_a_push_that_fails_is_told_at_once_to_who_waits(run) -> None:
    async def scenario(peers: Peers) -> None:
        waiting = asyncio.ensure_future(peers.reader.compare.call_one(7, 7))
        await asyncio.sleep(0.3)
        started = time.monotonic()
        with patch.object(courier, "store", side_effect=OSError("no room")), pytest.raises(OSError):
            await publish(7, make_model(7), rank=0, world_size=1)
        with pytest.raises(ActorError) as caught:
            await waiting
        assert time.monotonic() - started < 5
        assert isinstance(caught.value.exception, WeightsMissing) and "no room" in str(caught.value.exception)
        await check_recovered(peers, 7, 107)

    run(scenario)


def test_a_reader_keeps_a_version_until_it_is_killed(run, tmp_path: Path) -> None:
    async def scenario(peers: Peers) -> None:
        await peers.writer.publish.call_one(8, 8)
        fetching = asyncio.ensure_future(peers.reader.stay_in_fetch.call_one(8, str(tmp_path / "reached")))
        while not (tmp_path / "reached").exists():
            await asyncio.sleep(0.01)
        retiring = asyncio.ensure_future(retire(8))
        await asyncio.sleep(0.5)
        assert not retiring.done() and 8 not in await versions()
        peers.kill("reader")
        await asyncio.wait_for(retiring, 3)
        with pytest.raises((ActorError, SupervisionError)):
            await fetching
        await peers.start("reader")
        await check_recovered(peers, 8, 108)

    run(scenario)


def test_a_writer_killed_mid_push_is_named_and_another_one_pushes(run) -> None:
    async def scenario(peers: Peers) -> None:
        pid = peers.pids["writer"]
        with pytest.raises((ActorError, SupervisionError)):
            await peers.writer.die_while_pushing.call_one(9, 9)
        with pytest.raises(
            WeightsMissing, match=rf"tests' trainer's 1 ranks .*: 0 \(its process {pid} is gone\)"
        ):
            await fetch(9, timeout_s=0.2)
        assert 9 in await unfinished() and 9 not in await versions()
        await peers.start("writer")
        await check_recovered(peers, 9, 109)

    run(scenario)


def test_with_its_volume_a_version_is_lost_and_the_next_push_has_another(run) -> None:
    async def scenario(peers: Peers) -> None:
        await peers.writer.publish.call_one(10, 10)
        assert await peers.reader.compare.call_one(10, 10) == []
        [volume] = (
            {pid for pid in family() if arena_files(pid)} - set(peers.pids.values()) - {psutil.Process().pid}
        )
        psutil.Process(volume).kill()
        with pytest.raises(WeightsMissing, match="version 10 .*lost"):
            await fetch(10, timeout_s=10)
        lost = await newest_lost()
        assert await versions() == [] and lost is not None and lost[0] == 10
        await peers.writer.publish.call_one(11, 11)
        assert await newest_lost() is None
        assert await peers.reader.compare.call_one(11, 11) == []
        await check_recovered(peers, 11, 111)

    run(scenario)
