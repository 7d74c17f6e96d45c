"""Tensors put together from the parts of all ranks, on meshes that one process plays rank by rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge.errors import ForgeError, WeightsMismatch
from forge.weights.assembly import Assembly
from forge.weights.box import Box
from forge.weights.manifest import Manifest, Shards
from forge.weights.part import Part, pack, plan_pieces

FULL = {
    "even": torch.randn(8, 6).to(torch.bfloat16),
    "uneven": torch.randn(5, 3),
    "short": torch.randn(1, 4, dtype=torch.float64),
    "scalar_like": torch.randn(1),
}


def part_of(tensors: dict[str, Tensor]) -> tuple[Part, Tensor]:
    placed, nbytes = plan_pieces(tensors)
    arena = torch.full((nbytes,), 0xAB, dtype=torch.uint8)
    return pack(placed, arena), arena


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


def read(stored: list[tuple[Part, Tensor]], boxes: dict[str, Box] | None = None) -> Shards:
    """From arenas that are there as a whole."""
    parts = [part for part, _ in stored]
    assembly = Assembly(Manifest.of(0, parts, "the trainer"), parts, boxes)
    for number, (_, arena) in enumerate(stored):
        assembly.take_arena(number, arena)
    return assembly.finish()


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
    assert_bit_equal(read(parts_of_mesh(tensors, mesh_shape, placements)).tensors, tensors)


def test_tensor_parallel_columns_make_the_whole() -> None:
    tensors = {"even": FULL["even"], "uneven": FULL["uneven"]}
    assert_bit_equal(read(parts_of_mesh(tensors, (2, 2), [Shard(0), Shard(1)])).tensors, tensors)


def test_only_one_of_the_ranks_that_hold_the_same_stores_it() -> None:
    first, second = parts_of_mesh(FULL, (2,), [Replicate()])
    assert len(first[0].layout.pieces) == len(FULL) and not second[0].layout.pieces


def test_plain_tensors_and_tensors_on_some_ranks_only_make_the_whole() -> None:
    first, second = dict(list(FULL.items())[:2]), dict(list(FULL.items())[1:])
    assert_bit_equal(read([part_of(first), part_of(second)]).tensors, FULL)


def test_what_one_piece_holds_contiguously_shares_memory_with_the_arena() -> None:
    stored = [part_of(FULL)]
    rows, columns = Box((2, 0), (3, 6)), Box((0, 2), (8, 3))
    for box, is_view in ((Box.whole((8, 6)), True), (rows, True), (columns, False)):
        found = read(stored, {"even": box}).tensors["even"]
        assert torch.equal(found, FULL["even"][box.slices]) and found.is_contiguous()
        assert (found.untyped_storage().data_ptr() == stored[0][1].data_ptr()) == is_view


def test_tensors_that_are_not_contiguous_empty_or_of_no_dimension_survive() -> None:
    odd = {
        "transposed": torch.randn(4, 6).T,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "flags": torch.tensor([True, False, True]),
    }
    assert_bit_equal(read([part_of(odd)]).tensors, odd)


def test_a_flipped_bit_is_a_mismatch_that_names_the_tensor() -> None:
    part, arena = part_of(FULL)
    broken = next(piece for piece in part.layout.pieces if piece.name == "uneven")
    arena[broken.start + 17] ^= 4
    with pytest.raises(WeightsMismatch, match="uneven: fingerprint"):
        read([(part, arena)])


def test_a_flipped_bit_shows_at_once_where_a_box_is_made_of_whole_pieces() -> None:
    stored = parts_of_mesh({"even": FULL["even"]}, (4,), [Shard(0)])
    stored[1][1][stored[1][0].layout.pieces[0].start] ^= 1
    rows = Box((0, 0), (4, 6))
    with pytest.raises(WeightsMismatch, match="even: fingerprint"):
        read(stored, {"even": rows})
    part_of_each = {"even": Box((0, 0), (4, 5))}  # of these only all readers together can tell
    right, wrong = (read(found, part_of_each).claims["even"] for found in ([part_of(FULL)], stored))
    assert right.fingerprint != wrong.fingerprint


def test_a_box_of_no_such_tensor_or_outside_of_it_is_a_mismatch_that_names_it() -> None:
    stored = [part_of(FULL)]
    with pytest.raises(WeightsMismatch, match="oven: the trainer published no such tensor"):
        read(stored, {"oven": Box((0, 0), (1, 1))})
    for box in (Box((7, 0), (2, 1)), Box((0,), (1,))):
        with pytest.raises(WeightsMismatch, match="even: .* is wanted of a tensor of the shape"):
            read(stored, {"even": box})


def test_of_two_parts_that_have_the_same_the_first_is_read() -> None:
    near, far = part_of(FULL), part_of(FULL)
    parts = [near[0], far[0]]
    assembly = Assembly(Manifest.of(0, parts, "the trainer"), parts)
    assert len(assembly.sources(0)) == len(FULL) and not assembly.sources(1)


def test_a_partial_sum_is_refused() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        tensor = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()])
        with pytest.raises(ForgeError, match="w: a partial sum"):
            plan_pieces({"w": tensor})
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_a_tensor_without_elements_is_told_of_once(mesh_shape: tuple[int, ...]) -> None:
    empty = {"no_rows": torch.empty(0, 4), "no_columns": torch.empty(4, 0, dtype=torch.bfloat16)}
    stored = parts_of_mesh(empty, mesh_shape, [Shard(0)] * len(mesh_shape))
    assert [len(part.layout.pieces) for part, _ in stored] == [2] + [0] * (len(stored) - 1)
    assert_bit_equal(read(stored).tensors, empty)


def test_a_tensor_that_can_not_be_packed_is_named() -> None:
    with pytest.raises(ForgeError, match="^ghost can't be packed: "):
        part_of({"fine": torch.ones(3), "ghost": torch.empty(3, device="meta")})
