"""Any layout that is written can be read in any other, bit for bit, rank by rank in this one process."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge.weights.assembly import Assembly, batches
from forge.weights.box import Box
from forge.weights.cut import gather
from forge.weights.manifest import Manifest, Shards
from forge.weights.part import Part, pack, plan_pieces
from tests.weight_layouts import (
    GENERATORS,
    TRAINERS,
    Generator,
    Model,
    Trainer,
    models,
    same_bits,
    tensors_of,
)

ONCE = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def written(trainer: Trainer, model: Model, wholes: dict[str, Tensor]) -> list[tuple[Part, Tensor]]:
    """(part, arena) of every rank."""
    parts = []
    for rank in range(trainer.world_size):
        placed, nbytes = plan_pieces(trainer.tensors(model, wholes, rank))
        arena = torch.full((nbytes,), 0xAB, dtype=torch.uint8)
        parts.append((pack(placed, arena), arena))
    return parts


def read(
    manifest: Manifest, stored: list[tuple[Part, Tensor]], boxes: dict[str, Box], limit: int | None
) -> Shards:
    """limit: bytes of one message; None: arenas are there as a whole."""
    assembly = Assembly(manifest, [part for part, _ in stored], boxes)
    num_bytes = 0
    for number, (_, arena) in enumerate(stored):
        if limit is None:
            assembly.take_arena(number, arena)
            continue
        for batch in batches(assembly.sources(number), limit):
            packed = torch.empty(sum(source.nbytes for source in batch), dtype=torch.uint8)
            assert len(packed) <= max(limit, 4)
            gather(arena, [source.cut for source in batch], packed)
            assembly.take(batch, packed)
            num_bytes += len(packed)
    if limit is not None:
        wanted = sum(boxes[n].numel * manifest.tensors[n].dtype.itemsize for n in boxes)
        assert num_bytes == wanted, "readers get the bytes of their boxes and no others"
    return assembly.finish()


@ONCE
@given(models(), st.sampled_from(TRAINERS), st.sampled_from(GENERATORS), st.none() | st.integers(4, 400))
def test_what_any_trainer_writes_any_generator_reads(
    model: Model, trainer: Trainer, generator: Generator, limit: int | None
) -> None:
    wholes = tensors_of(model)
    stored = written(trainer, model, wholes)
    manifest = Manifest.of(3, [part for part, _ in stored], "the trainer")
    assert {n: (f.dtype, f.shape) for n, f in manifest.tensors.items()} == {
        n: (t.dtype, tuple(t.shape)) for n, t in wholes.items()
    }
    claims = []
    for rank in range(generator.world_size):
        boxes = generator.boxes(model, rank)
        shards = read(manifest, stored, boxes, limit)
        assert shards.tensors.keys() == boxes.keys()
        for name, box in boxes.items():
            assert same_bits(shards.tensors[name], wholes[name][box.slices]), name
        claims.append(shards.claims)
    manifest.prove(claims)


@ONCE
@given(models(), st.sampled_from(TRAINERS))
def test_each_element_is_stored_once(model: Model, trainer: Trainer) -> None:
    wholes = tensors_of(model)
    stored = [piece for part, _ in written(trainer, model, wholes) for piece in part.layout.pieces]
    for name, whole in wholes.items():
        count = torch.zeros(whole.shape, dtype=torch.int)
        for piece in stored:
            if piece.name == name:
                count[piece.box.slices] += 1
        assert count.eq(1).all(), name
