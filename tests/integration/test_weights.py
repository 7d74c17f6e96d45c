"""Weights through the real TorchStore: publishers and readers are Monarch processes."""

import asyncio
import contextlib
import functools
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import monarch.actor
import psutil
import pytest
import torch
from monarch.actor import Actor, ActorError, current_rank, endpoint, this_host
from torch import Tensor

from forge.errors import ForgeError, WeightsMismatch, WeightsMissing
from forge.weights import begin_push, close_store, fetch, open_store, publish, retire, unfinished, versions
from forge.weights.process import Process
from forge.weights.registry import Reader
from forge.weights.store import connect
from forge.weights.sync import _hold

SHAPES = {
    "embed": ((513, 64), torch.bfloat16),
    "up": ((5, 24), torch.float32),
    "norm": ((7,), torch.float32),
    "one_row": ((1, 16), torch.bfloat16),
    "scalar": ((), torch.float32),
}
MB = 1 << 20


def make_model(seed: int, scale: int = 1) -> dict[str, Tensor]:
    """The same tensors in every process that asks with the same seed."""
    generator = torch.Generator().manual_seed(seed)
    model = {n: torch.randn(shape, generator=generator).to(dtype) for n, (shape, dtype) in SHAPES.items()}
    if scale > 1:
        model["large"] = torch.randn(scale, MB // 4, generator=generator)
    return model


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    def same(a: Tensor, b: Tensor) -> bool:
        return a.dtype == b.dtype and torch.equal(a, b)

    return [
        n
        for n in found.keys() | wanted.keys()
        if n not in found or n not in wanted or not same(found[n], wanted[n])
    ]


def descriptors(pid: int | str) -> dict[Path, str]:
    """What each open descriptor of a process points to, without those that close meanwhile."""
    targets = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            targets[link] = os.readlink(link)
    return targets


def arena_files(pid: int | str) -> dict[int, str]:
    """The arenas that a process holds: path of a descriptor by inode."""
    held = {}
    for link, target in descriptors(pid).items():
        if "forge-weights" in target:
            with contextlib.suppress(FileNotFoundError):
                held[link.stat().st_ino] = str(link)
    return held


def usage() -> tuple[int, int]:
    """Open descriptors, without sockets, of which Monarch opens some now and then, and resident bytes."""
    files = [target for target in descriptors("self").values() if not target.startswith("socket:")]
    return len(files), psutil.Process().memory_info().rss


def shared_memory_with_a_name(pid: int) -> set[str]:
    """Files of /dev/shm that a process maps or holds open: they would outlive it."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = [line.split(maxsplit=5)[-1] for line in lines]
    return {path for path in (*paths, *descriptors(pid).values()) if path.startswith("/dev/shm/")}


class Peer(Actor):
    """One process that publishes and fetches."""

    def __init__(self, world_size: int = 1, port: int = 0) -> None:
        torch.set_num_threads(1)
        self.rank = current_rank().rank
        self.world_size = world_size
        self.held: dict[str, Tensor] = {}
        if world_size > 1:
            torch.distributed.init_process_group(
                "gloo", f"tcp://127.0.0.1:{port}", rank=self.rank, world_size=world_size
            )

    @endpoint
    async def publish(self, version: int, seed: int, scale: int = 1, world_size: int = 1) -> None:
        model = make_model(seed, scale)
        await publish(version, model, rank=self.rank, world_size=world_size)
        for tensor in model.values():
            tensor.zero_()  # what was published must not change

    @endpoint
    async def publish_sharded(self, version: int, seed: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (self.world_size,))
        places = {"up": Shard(1), "scalar": Replicate()}
        model = {
            n: distribute_tensor(t, mesh, [places.get(n, Shard(0))], src_data_rank=None)
            for n, t in make_model(seed).items()
        }
        await publish(version, model, rank=self.rank, world_size=self.world_size)

    @endpoint
    async def compare(self, version: int, seed: int, scale: int = 1, timeout_s: float = 10.0) -> list[str]:
        return differences(await fetch(version, timeout_s), make_model(seed, scale))

    @endpoint
    async def hold(self, version: int) -> None:
        self.held = await fetch(version)

    @endpoint
    async def compare_held(self, seed: int) -> list[str]:
        return differences(self.held, make_model(seed))

    @endpoint
    async def let_go(self) -> None:
        self.held = {}

    @endpoint
    async def write_to_held(self) -> None:
        for tensor in self.held.values():
            tensor.zero_()

    @endpoint
    async def flip_bit_of(self, name: str, seed: int) -> None:
        """Damages a published tensor, in the newest arena of this process that holds it."""
        wanted = make_model(seed)[name].view(torch.uint8).numpy().tobytes()
        for path in arena_files("self").values():
            content = Path(path).read_bytes()
            if (found := content.find(wanted)) >= 0:
                with open(path, "r+b") as file:
                    file.seek(found + 5)
                    file.write(bytes([content[found + 5] ^ 1]))

    @endpoint
    async def start_reading(self, version: int) -> None:
        self.reading = _hold(await connect(), version, Reader(Process.this(), -1), timeout_s=10.0)
        await self.reading.__aenter__()

    @endpoint
    async def stop_reading(self) -> None:
        await self.reading.__aexit__(None, None, None)

    @endpoint
    async def usage(self) -> tuple[int, int]:
        return usage()


def use_messages() -> None:
    os.environ["FORGE_WEIGHTS_HOST"] = "elsewhere"


@pytest.fixture(scope="module")
def run() -> Iterator:
    """Runs a coroutine on the one event loop of this module."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def peers(run) -> Iterator[SimpleNamespace]:
    """A publisher, a trainer of two ranks, two readers, and a process that can't share memory."""
    monarch.actor.unhandled_fault_hook = lambda failure: None
    meshes = []

    def start(name: str, procs: int, *args: int, bootstrap=None):
        meshes.append(this_host().spawn_procs({"procs": procs}, bootstrap=bootstrap))
        return meshes[-1].spawn(name, Peer, *args)

    async def stop() -> None:
        await asyncio.gather(*(mesh.stop() for mesh in meshes))
        await close_store()

    run(open_store())
    try:
        yield SimpleNamespace(
            publisher=start("publisher", 1),
            trainer=start("trainer", 2, 2, 29653),
            readers=start("readers", 2),
            distant=start("distant", 1, bootstrap=functools.partial(use_messages)),
        )
    finally:
        run(stop())


def values(mesh_reply) -> list:
    return [value for _, value in mesh_reply]


def test_two_readers_get_bit_for_bit_what_was_published(run, peers) -> None:
    async def scenario() -> None:
        await peers.publisher.publish.call_one(1, seed=1)
        assert values(await peers.readers.compare.call(1, seed=1)) == [[], []]

    run(scenario())


def test_readers_may_come_before_the_publisher(run, peers) -> None:
    async def scenario() -> None:
        reading = asyncio.ensure_future(peers.readers.compare.call(2, seed=2))
        await asyncio.sleep(0.3)
        await peers.publisher.publish.call_one(2, seed=2)
        assert values(await reading) == [[], []]

    run(scenario())


def test_shards_of_two_ranks_become_whole_tensors(run, peers) -> None:
    async def scenario() -> None:
        await peers.trainer.publish_sharded.call(3, seed=3)
        assert values(await peers.readers.compare.call(3, seed=3)) == [[], []]

    run(scenario())


@pytest.mark.parametrize(
    ("writer", "reader"), [("distant", "readers"), ("publisher", "distant"), ("distant", "distant")]
)
def test_processes_that_share_no_memory_exchange_weights_by_messages(
    run, peers, writer: str, reader: str
) -> None:
    version = 10 + ["distant", "publisher"].index(writer) + 2 * ["distant", "readers"].index(reader)

    async def scenario() -> None:
        await getattr(peers, writer).publish.call_one(version, seed=version, scale=40)
        found = values(await getattr(peers, reader).compare.call(version, seed=version, scale=40))
        assert not any(found)
        await retire(version)

    run(scenario())


def test_the_root_process_publishes_and_fetches_too(run, peers) -> None:
    async def scenario() -> None:
        await publish(20, make_model(20), rank=0, world_size=1)
        assert not differences(await fetch(20), make_model(20))

    run(scenario())


def test_a_version_nobody_published_is_missing_within_the_deadline(run, peers) -> None:
    async def scenario() -> None:
        await publish(30, make_model(30), rank=0, world_size=1)
        start = time.monotonic()
        with pytest.raises(ActorError) as caught:
            await peers.readers.compare.call(31, seed=31, timeout_s=0.5)
        assert 0.5 <= time.monotonic() - start < 2.0
        assert isinstance(caught.value.exception, WeightsMissing)
        message = str(caught.value.exception)
        assert (
            "version 31" in message
            and "no rank of the trainer has begun" in message
            and "the last was 30" in message
        )

    run(scenario())


def test_a_half_published_version_names_the_missing_rank_and_is_not_listed(run, peers) -> None:
    async def scenario() -> None:
        await peers.publisher.publish.call_one(32, seed=32, world_size=2)
        with pytest.raises(
            WeightsMissing, match="of the trainer's 2 ranks these have not published their part: 1 "
        ):
            await fetch(32, timeout_s=0.2)
        assert 32 not in await versions()

    run(scenario())


def test_a_version_can_not_be_published_twice(run, peers) -> None:
    async def scenario() -> None:
        await publish(33, make_model(33), rank=0, world_size=1)
        with pytest.raises(ForgeError, match="version 33 of the weights is already published by rank 0 of 1"):
            await publish(33, make_model(34), rank=0, world_size=1)
        assert not differences(await fetch(33), make_model(33))

    run(scenario())


def test_a_version_that_is_read_is_retired_when_its_reader_lets_go(run, peers) -> None:
    reader = peers.readers.slice(procs=0)

    async def scenario() -> None:
        await publish(34, make_model(34), rank=0, world_size=1)
        await reader.start_reading.call_one(34)
        retiring = asyncio.ensure_future(retire(34))
        await asyncio.sleep(0.3)
        assert not retiring.done()
        with pytest.raises(WeightsMissing, match="version 34 of the weights is being retired"):
            await fetch(34)
        await reader.stop_reading.call_one()
        await asyncio.wait_for(retiring, 2.0)
        await publish(35, make_model(35), rank=0, world_size=1)
        await reader.start_reading.call_one(35)
        await asyncio.wait_for(retire(35, timeout_s=0.2), 2.0)  # however slow the reader is
        await reader.stop_reading.call_one()
        assert not {34, 35} & set(await versions())

    run(scenario())


def test_who_waits_for_a_push_that_fails_hears_of_it_at_once(run, peers) -> None:
    async def scenario() -> None:
        reading = asyncio.ensure_future(peers.readers.compare.call(36, seed=36, timeout_s=60.0))
        await asyncio.sleep(0.1)
        start = time.monotonic()
        with pytest.raises(AttributeError):
            await publish(36, {"w": None}, rank=0, world_size=1, publisher="the critic")  # type: ignore
        with pytest.raises(ActorError) as caught:
            await reading
        assert time.monotonic() - start < 5.0
        assert isinstance(caught.value.exception, WeightsMissing)
        assert "the push of the critic's rank 0 failed: AttributeError" in str(caught.value.exception)
        with pytest.raises(ForgeError, match="AttributeError.*: retire it first"):
            await publish(36, make_model(36), rank=0, world_size=1)
        await retire(36)
        await publish(36, make_model(36), rank=0, world_size=1)
        assert not differences(await fetch(36), make_model(36))

    run(scenario())


def test_a_version_of_which_one_of_several_ranks_failed_is_retired_at_once_and_pushed_again(
    run, peers
) -> None:
    async def scenario() -> None:
        version = 39
        for rank in range(3):
            await publish(version, {f"w{rank}": torch.ones(4)}, rank=rank, world_size=4)
        push = await begin_push(version, rank=3, world_size=4)
        await push.fail(OSError("no room"))
        await retire(version)
        assert version not in await unfinished()
        await publish(version, make_model(version), rank=0, world_size=1)
        await asyncio.sleep(0.1)  # nothing that is still being deleted is of the new push
        assert not differences(await fetch(version), make_model(version))
        await retire(version)

    run(scenario())


def test_a_volume_that_is_killed_takes_its_versions_along_and_is_replaced(run, peers) -> None:
    async def scenario() -> None:
        await publish(37, make_model(37), rank=0, world_size=1)
        newest = max(arena_files("self"))
        children = psutil.Process().children(recursive=True)
        (volume,) = (child for child in children if newest in arena_files(child.pid))
        volume.kill()
        with pytest.raises(WeightsMissing, match="version 37 .* is lost: the volume .* is gone"):
            while True:
                await fetch(37)
        assert await versions() == []
        await publish(38, make_model(38), rank=0, world_size=1)
        assert values(await peers.readers.compare.call(38, seed=38)) == [[], []]

    run(scenario())


def test_damaged_bits_are_a_mismatch_that_names_the_tensor(run, peers) -> None:
    async def scenario() -> None:
        await peers.publisher.publish.call_one(40, seed=40)
        assert values(await peers.readers.compare.call(40, seed=40)) == [[], []]
        await peers.publisher.flip_bit_of.call_one("up", seed=40)
        with pytest.raises(WeightsMismatch, match="version 40 of the weights is damaged: up: fingerprint"):
            await fetch(40)

    run(scenario())


def test_versions_lists_complete_versions_until_they_are_retired(run, peers) -> None:
    async def scenario() -> None:
        for version in await versions():
            await retire(version)
        for version in (52, 50, 110):
            await publish(version, make_model(version), rank=0, world_size=1)
        assert await versions() == [50, 52, 110]
        await retire(52)
        await retire(52)
        assert await versions() == [50, 110]
        with pytest.raises(WeightsMissing, match="version 52"):
            await fetch(52, timeout_s=0.0)

    run(scenario())


def test_fetched_tensors_stay_as_they_are_while_later_versions_come_and_go(run, peers) -> None:
    async def scenario() -> None:
        await peers.publisher.publish.call_one(60, seed=60)
        await peers.readers.hold.call(60)
        await retire(60)
        for version in range(61, 66):
            await peers.publisher.publish.call_one(version, seed=version)
            await retire(version)
        assert values(await peers.readers.compare_held.call(60)) == [[], []]
        await peers.readers.let_go.call()

    run(scenario())


def test_what_a_reader_writes_to_its_tensors_no_other_reader_sees(run, peers) -> None:
    async def scenario() -> None:
        await peers.publisher.publish.call_one(70, seed=70)
        await peers.readers.hold.call(70)
        await peers.readers.slice(procs=0).write_to_held.call_one()
        assert values(await peers.readers.compare_held.call(70))[1] == []
        assert not differences(await fetch(70), make_model(70))
        await peers.readers.let_go.call()

    run(scenario())


def test_a_hundred_versions_leave_memory_and_descriptors_flat(run, peers) -> None:
    publisher, reader = peers.publisher, peers.readers.slice(procs=0)

    async def usages() -> list[tuple[int, int]]:
        return [usage(), await publisher.usage.call_one(), await reader.usage.call_one()]

    def num_arenas() -> int:
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return len({inode for process in family for inode in arena_files(process.pid)})

    async def turn(version: int) -> None:
        await publisher.publish.call_one(version, seed=version, scale=4)
        assert await reader.compare.call_one(version, seed=version, scale=4) == []
        await retire(version - 1)

    async def scenario() -> None:
        for version in await versions():
            await retire(version)
        for version in range(200, 220):
            await turn(version)
        before, arenas_before = await usages(), num_arenas()
        for version in range(220, 320):
            await turn(version)
        after = await usages()
        assert num_arenas() <= arenas_before
        for (fds_before, rss_before), (fds_after, rss_after) in zip(before, after, strict=True):
            assert fds_after <= fds_before
            # 100 leaked versions are 400 MB; the allocator swings by up to 40 MB under the models made here.
            assert rss_after <= rss_before + 64 * MB
        assert await versions() == [319]

    run(scenario())


LIFE = """
    import asyncio, torch, psutil
    from forge.errors import ForgeError
    from monarch.actor import this_host
    from forge.weights import open_store, close_store, publish, fetch, versions

    def children():
        return [child.pid for child in psutil.Process().children(recursive=True)]

    async def main():
        try:
            await versions()
        except ForgeError as error:
            print("before:", error)
        await asyncio.gather(open_store(), open_store())
        print("opened:", len(children()))
        await publish(1, {"w": torch.ones(1000, 1000)}, rank=0, world_size=1)
        print("fetched:", (await fetch(1))["w"].sum().item())
        print("published:", len(children()))
        await close_store()
        await close_store()
        print("closed:", len(children()))
        await open_store([this_host()])
        print("dedicated:", len(children()))
        await publish(2, {"w": torch.ones(10)}, rank=0, world_size=1)
        print("again:", await versions())
        print("children:", *children(), flush=True)
        await asyncio.sleep(120)

    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def life() -> Iterator[tuple[subprocess.Popen, dict[str, str]]]:
    """A root process that has opened the store a second time, and what it has printed."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LIFE)], stdout=subprocess.PIPE, text=True
    ) as process:
        printed = {}
        assert process.stdout is not None
        for line in process.stdout:
            name, _, value = line.strip().partition(": ")
            printed[name] = value
            if name == "children":
                break
        yield process, printed
        process.kill()


def test_a_store_opens_once_closes_without_a_trace_and_opens_again(life) -> None:
    _, printed = life
    assert "no weight store is open" in printed["before"]
    assert printed["fetched"] == "1000000.0"
    assert (printed["opened"], printed["published"], printed["closed"]) == ("0", "1", "0")
    assert printed["dedicated"] == "1" and printed["again"] == "[2]"


def test_nothing_is_left_when_the_root_process_is_killed(life) -> None:
    process, printed = life
    children = [int(pid) for pid in printed["children"].split()]
    named = [path for pid in (process.pid, *children) for path in shared_memory_with_a_name(pid)]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, children))
    assert not named  # what has no name vanishes with its processes
