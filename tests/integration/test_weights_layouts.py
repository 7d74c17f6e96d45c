"""Weights resharded through the real store: FSDP2 over tensor parallelism writes, any layout reads.

Layouts in all their combinations: tests/unit/weights/test_layouts.py. Here are the true DTensors, processes
that share memory, and one that looks as if it ran on another host.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from monarch.actor import Actor, current_rank, endpoint, this_host
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from forge.weights import close_store, courier, fetch, fetch_shards, open_store, publish
from forge.weights.manifest import Claim
from forge.weights.transport import Transport
from tests.weight_layouts import (
    GENERATORS,
    Generator,
    Model,
    Trainer,
    Weight,
    models,
    same_bits,
    tensors_of,
)

TRAINERS = [
    Trainer(shards=4),
    Trainer(tensor=4),
    Trainer(shards=2, tensor=2),
    Trainer(replicas=2, shards=2),
    Trainer(stages=2, shards=2),
    Trainer(stages=2, tensor=2),
]
WORLD_SIZE = 4
LARGE: Model = {  # more than two messages, of which none is full
    "embed": Weight((40_001, 500), torch.bfloat16, 0, 0.0),
    "down": Weight((300, 1001), torch.float32, 1, 0.0),
}
AWAY = [Transport.MESSAGES, Transport.RDMA]


class Rank(Actor):
    """A trainer's rank, and any reader."""

    def __init__(self, path: str | None = None) -> None:
        torch.set_num_threads(1)
        self.rank = current_rank().rank
        if path is not None:
            dist.init_process_group(
                "gloo", init_method=f"file://{path}", rank=self.rank, world_size=WORLD_SIZE
            )

    @endpoint
    async def publish_sharded(self, version: int, model: Model, trainer: Trainer) -> None:
        tensors = _sharded(model, trainer, self.rank)
        await publish(version, tensors, rank=self.rank, world_size=WORLD_SIZE)

    @endpoint
    async def publish_whole(self, version: int, model: Model) -> None:
        await publish(version, tensors_of(model), rank=0, world_size=1)

    @endpoint
    async def choose(self, transport: Transport) -> None:
        """How what is put and got from now on travels to and from other hosts."""
        os.environ["TORCHSTORE_USE_RDMA"] = str(int(transport is Transport.RDMA))

    @endpoint
    async def read(
        self, version: int, model: Model, generator: Generator
    ) -> tuple[list[dict[str, Claim]], Counter[Transport]]:
        return await read(version, model, generator)


def _sharded(model: Model, trainer: Trainer, rank: int) -> dict[str, Tensor]:
    mesh, wholes, module = _mesh(trainer), tensors_of(model), nn.Module()
    names = trainer.names(model, rank)
    for number, name in enumerate(names):
        tensor, split = wholes[name], model[name].split
        if trainer.tensor > 1:
            place = Replicate() if split is None else Shard(split)
            tensor = distribute_tensor(tensor, mesh["tensor"], [place], src_data_rank=None)
        module.register_parameter(str(number), nn.Parameter(tensor))
    if trainer.replicas > 1:
        fully_shard(module, mesh=mesh["replicas", "shards"])
    elif trainer.shards > 1:
        fully_shard(module, mesh=mesh["shards"])
    return {names[int(number)]: tensor for number, tensor in module.state_dict().items()}


@cache
def _mesh(trainer: Trainer) -> DeviceMesh:
    degrees = (trainer.stages, trainer.replicas, trainer.shards, trainer.tensor)
    return init_device_mesh("cpu", degrees, mesh_dim_names=("stages", "replicas", "shards", "tensor"))


async def read(
    version: int, model: Model, generator: Generator
) -> tuple[list[dict[str, Claim]], Counter[Transport]]:
    """Plays all readers of a layout; returns the claims of each, and how many bytes have travelled here."""
    wholes, before, claims = tensors_of(model), Counter(courier.received_nbytes), []
    for rank in range(generator.world_size):
        boxes = generator.boxes(model, rank)
        shards = await fetch_shards(version, boxes)
        assert shards.tensors.keys() == boxes.keys()
        for name, box in boxes.items():
            assert same_bits(shards.tensors[name], wholes[name][box.slices]), name
        claims.append(shards.claims)
    return claims, courier.received_nbytes - before


def _look_like_another_host() -> None:
    os.environ["FORGE_WEIGHTS_HOST"] = "elsewhere"


@pytest.fixture(scope="module")
def run() -> Iterator:
    """Runs a coroutine on the one event loop of this module."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def actors(run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The trainer's ranks, on the host of the volume, and a process on another."""
    meeting = tmp_path_factory.mktemp("gloo") / "store"
    trainer = this_host().spawn_procs({"procs": WORLD_SIZE})
    elsewhere = this_host().spawn_procs({"procs": 1}, bootstrap=partial(_look_like_another_host))

    async def stop() -> None:
        await asyncio.gather(trainer.stop(), elsewhere.stop())
        await close_store()

    run(open_store([this_host()]))
    try:
        yield SimpleNamespace(
            ranks=trainer.spawn("ranks", Rank, str(meeting)), far=elsewhere.spawn("far", Rank)
        )
    finally:
        run(stop())


@pytest.fixture(scope="module")
def versions() -> Iterator[int]:
    """Numbers that no version has yet."""
    return iter(range(10_000))


def nbytes(model: Model, generator: Generator) -> int:
    """Of the boxes of all ranks."""
    boxes = [box for rank in range(generator.world_size) for box in generator.boxes(model, rank).items()]
    return sum(box.numel * model[name].dtype.itemsize for name, box in boxes)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    model=models(),
    trainer=st.sampled_from(TRAINERS),
    generator=st.sampled_from(GENERATORS),
    away=st.sampled_from(AWAY),
)
def test_any_reader_gets_the_bits_that_any_trainer_holds_and_no_byte_too_many(
    run, actors, versions, model: Model, trainer: Trainer, generator: Generator, away: Transport
) -> None:
    version = next(versions)

    async def scenario() -> None:
        await actors.ranks.publish_sharded.call(version, model, trainer)
        whole = await fetch_shards(version)
        assert whole.tensors.keys() == model.keys()
        assert all(same_bits(whole.tensors[name], t) for name, t in tensors_of(model).items())
        await actors.far.choose.call_one(away)
        near, far = await asyncio.gather(
            read(version, model, generator), actors.far.read.call_one(version, model, generator)
        )
        for claims, _ in (near, far):
            whole.manifest.prove(claims)
        assert not near[1], "within a host no byte travels"
        assert far[1] == {away: nbytes(model, generator)}, "only what is asked for travels"

    run(scenario())


@pytest.mark.parametrize("transport", AWAY)
def test_what_is_published_from_another_host_is_read_on_both(
    run, actors, versions, transport: Transport
) -> None:
    version, generator = next(versions), Generator(tensor=2)

    async def scenario() -> None:
        await actors.far.choose.call_one(transport)
        await actors.far.publish_whole.call_one(version, LARGE)
        wholes = tensors_of(LARGE)
        assert all(same_bits(t, wholes[name]) for name, t in (await fetch(version)).items())
        claims, near = await read(version, LARGE, generator)
        far_claims, far = await actors.far.read.call_one(version, LARGE, generator)
        assert far_claims == claims
        assert not near and far == {transport: nbytes(LARGE, generator)}

    run(scenario())
