"""Parts of all ranks, packed and put together again, on meshes that one process plays rank by rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge.errors import ForgeError, WeightsMismatch
from forge.weights.assembly import assemble
from forge.weights.manifest import Part, pack, plan_pieces

FULL = {
    "even": torch.randn(8, 6).to(torch.bfloat16),
    "uneven": torch.randn(5, 3),
    "short": torch.randn(1, 4, dtype=torch.float64),
    "scalar_like": torch.randn(1),
}


def part_of(tensors: dict[str, Tensor]) -> tuple[Part, Tensor]:
    placed, nbytes = plan_pieces(tensors)
    arena = torch.full((nbytes,), 0xAB, dtype=torch.uint8)
    return Part(pack(placed, arena), nbytes, nbytes), arena


def parts_of_mesh(
    tensors: dict[str, Tensor], mesh_shape: tuple[int, ...], placements: list[Placement]
) -> list[tuple[Part, Tensor]]:
    world_size = torch.Size(mesh_shape).numel()
    parts = []
    for rank in range(world_size):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", mesh_shape)
            sharded = {
                n: distribute_tensor(t, mesh, placements, src_data_rank=None) for n, t in tensors.items()
            }
            parts.append(part_of(sharded))
        finally:
            dist.destroy_process_group()
    return parts


def assert_bit_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((2,), [Shard(0)]),
        ((4,), [Shard(0)]),
        ((2,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Replicate()]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),  # FSDP over tensor parallel
    ],
)
def test_parts_of_any_mesh_make_the_whole(mesh_shape: tuple[int, ...], placements: list[Placement]) -> None:
    tensors = {"even": FULL["even"]} if _StridedShard in map(type, placements) else FULL
    assert_bit_equal(assemble(parts_of_mesh(tensors, mesh_shape, placements)), tensors)


def test_tensor_parallel_columns_make_the_whole() -> None:
    tensors = {"even": FULL["even"], "uneven": FULL["uneven"]}
    assert_bit_equal(assemble(parts_of_mesh(tensors, (2, 2), [Shard(0), Shard(1)])), tensors)


def test_only_one_of_the_ranks_that_hold_the_same_stores_it() -> None:
    first, second = parts_of_mesh(FULL, (2,), [Replicate()])
    assert len(first[0].pieces) == len(FULL) and not second[0].pieces


def test_plain_tensors_and_tensors_on_some_ranks_only_make_the_whole() -> None:
    first, second = dict(list(FULL.items())[:2]), dict(list(FULL.items())[1:])
    assert_bit_equal(assemble([part_of(first), part_of(second)]), FULL)


def test_a_whole_tensor_shares_memory_with_the_arena() -> None:
    part, arena = part_of(FULL)
    assert assemble([(part, arena)])["even"].untyped_storage().data_ptr() == arena.data_ptr()


def test_tensors_that_are_not_contiguous_empty_or_of_no_dimension_survive() -> None:
    odd = {
        "transposed": torch.randn(4, 6).T,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "flags": torch.tensor([True, False, True]),
    }
    assert_bit_equal(assemble([part_of(odd)]), odd)


def test_a_missing_shard_is_a_mismatch_that_names_the_tensor() -> None:
    first, _ = parts_of_mesh({"even": FULL["even"]}, (2,), [Shard(0)])
    with pytest.raises(WeightsMismatch, match="even: the ranks published 24 of its 48 elements"):
        assemble([first])


def test_ranks_that_disagree_are_a_mismatch_that_names_the_tensor() -> None:
    ones = part_of({"w": torch.ones(3)})
    with pytest.raises(WeightsMismatch, match="w: two ranks published different values"):
        assemble([ones, part_of({"w": torch.zeros(3)})])
    with pytest.raises(WeightsMismatch, match="w: ranks disagree on dtype or shape"):
        assemble([ones, part_of({"w": torch.ones(4)})])


def test_a_flipped_bit_is_a_mismatch_that_names_the_tensor() -> None:
    part, arena = part_of(FULL)
    broken = next(piece for piece in part.pieces if piece.name == "uneven")
    arena[broken.start + 17] ^= 4
    with pytest.raises(WeightsMismatch, match="uneven: fingerprint"):
        assemble([(part, arena)])


def test_a_partial_sum_is_refused() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        tensor = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()])
        with pytest.raises(ForgeError, match="w is a partial sum"):
            plan_pieces({"w": tensor})
    finally:
        dist.destroy_process_group()
