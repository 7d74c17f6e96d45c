"""Boxes against masks: what is true of a box is true of the elements it marks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from forge.errors import ForgeError
from forge.weights.box import Box, box_of, why_not_tiled
from tests.weight_layouts import Trainer

FEW = settings(max_examples=100, deadline=None, derandomize=True, database=None)
SHAPE = (4, 5, 3)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...] = SHAPE) -> Box:
    """Of at least one element, inside the shape."""
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(offsets, tuple(draw(st.integers(1, n - o)) for o, n in zip(offsets, shape, strict=True)))


def mask(*found: Box, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """How many of the boxes each element lies in."""
    count = torch.zeros(shape, dtype=torch.int)
    for box in found:
        count[box.slices] += 1
    return count


@FEW
@given(boxes(), boxes())
def test_the_intersection_is_what_both_mark(a: Box, b: Box) -> None:
    common = a.intersection(b)
    assert torch.equal(mask(*[common] if common else []), mask(a) * mask(b))
    assert a.is_inside(b) == (common == a)


@FEW
@given(boxes(), boxes())
def test_a_relative_box_marks_the_same_elements(a: Box, outer: Box) -> None:
    inner = a.intersection(outer)
    if inner is not None:
        whole = torch.arange(math.prod(SHAPE)).view(SHAPE)
        assert torch.equal(whole[outer.slices][inner.relative_to(outer).slices], whole[inner.slices])


@FEW
@given(boxes(), st.integers(1, 70))
def test_a_box_splits_into_small_ones_that_tile_it_in_row_major_order(box: Box, numel: int) -> None:
    small = list(box.split(numel))
    assert all(0 < part.numel <= numel for part in small)
    assert torch.equal(mask(*small), mask(box))
    whole = torch.arange(math.prod(SHAPE)).view(SHAPE)
    firsts = [int(whole[part.offsets]) for part in small]
    assert firsts == sorted(firsts)


@st.composite
def tilings(draw: st.DrawFn) -> list[Box]:
    """Boxes that tile SHAPE, which no grid need make: each cut goes through one box only."""
    found = [Box.whole(SHAPE)]
    for _ in range(draw(st.integers(0, 6))):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        dim = draw(st.integers(0, len(SHAPE) - 1))
        at = draw(st.integers(0, box.shape[dim] - 1))
        for first, size in ((0, at), (at, box.shape[dim] - at)):
            if size:
                offsets, shape = list(box.offsets), list(box.shape)
                offsets[dim] += first
                shape[dim] = size
                found.append(Box(tuple(offsets), tuple(shape)))
    return found


@FEW
@given(tilings(), st.data())
def test_only_boxes_that_mark_every_element_once_tile(tiling: list[Box], data: st.DataObject) -> None:
    assert why_not_tiled(tiling, SHAPE) is None
    changed = list(tiling)
    changed[data.draw(st.integers(0, len(tiling) - 1))] = data.draw(boxes())
    assert (why_not_tiled(changed, SHAPE) is None) == bool(mask(*changed).eq(1).all())


def test_what_does_not_tile_is_said() -> None:
    assert why_not_tiled([Box((0,), (3,))], (4,)) == "the boxes hold 3 of its 4 elements"
    overlap = why_not_tiled([Box((0,), (3,)), Box((2,), (2,))], (4,))
    assert overlap == "the boxes of shape (3,) at (0,) and (2,) at (2,) overlap"
    assert "outside" in str(why_not_tiled([Box((2,), (3,))], (4,)))
    assert "outside" in str(why_not_tiled([Box((0, 0), (2, 2))], (4,)))


def test_tensors_without_elements_or_dimensions_are_tiled_by_themselves() -> None:
    for shape in ((), (0, 3)):
        assert why_not_tiled([Box.whole(shape)], shape) is None


def test_a_rank_without_a_shard_has_no_box() -> None:
    trainer = Trainer(shards=4)
    empty = DTensor.from_local(
        torch.empty(0, 2), trainer.mesh(3), [Shard(0)], run_check=False, shape=(3, 2), stride=(2, 1)
    )
    assert box_of(empty) is None


def test_a_replicated_tensor_is_held_whole_and_a_partial_sum_is_refused() -> None:
    mesh = Trainer(shards=2).mesh(1)
    local = torch.zeros(3, 2)
    assert box_of(DTensor.from_local(local, mesh, [Replicate()], run_check=False)) == Box.whole((3, 2))
    with pytest.raises(ForgeError, match="reduce it first"):
        box_of(DTensor.from_local(local, mesh, [Partial()], run_check=False))
