"""Box: a rectangular region of a whole tensor, such as the shard of one rank."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from forge.errors import ForgeError


@dataclass(frozen=True, slots=True)
class Box:
    """Of the whole tensor: the elements from `offsets` on, `shape` of them in each dimension."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.offsets) == len(self.shape), f"{self} has unequal numbers of dimensions"

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offsets, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in the whole tensor."""
        return tuple(map(slice, self.offsets, self.stops))

    def is_inside(self, outer: "Box") -> bool:
        return len(self.shape) == len(outer.shape) and all(
            outer.offsets[d] <= self.offsets[d] and self.stops[d] <= outer.stops[d]
            for d in range(len(self.shape))
        )

    def intersection(self, other: "Box") -> "Box | None":
        """What both have in common; None where that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(map(min, self.stops, other.stops))
        shape = tuple(stop - offset for offset, stop in zip(offsets, stops, strict=True))
        return Box(offsets, shape) if all(n > 0 for n in shape) else None

    def relative_to(self, outer: "Box") -> "Box":
        """The same region, with offsets counted from the first element of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.shape)

    def split(self, numel: int) -> Iterator["Box"]:
        """Boxes of at most `numel` elements each that make up this one, in row-major order."""
        if self.numel <= numel:
            yield self
            return
        dim = next(d for d, n in enumerate(self.shape) if n > 1)
        step = max(1, numel * self.shape[dim] // self.numel)
        for first in range(0, self.shape[dim], step):
            size = min(step, self.shape[dim] - first)
            offsets = (*self.offsets[:dim], self.offsets[dim] + first, *self.offsets[dim + 1 :])
            yield from Box(offsets, (*self.shape[:dim], size, *self.shape[dim + 1 :])).split(numel)


def box_of(tensor: DTensor) -> Box | None:
    """This rank's box of a DTensor; None where the rank holds nothing of it. Raises ForgeError for a partial
    sum.

    Shards of a dimension are those of torch.chunk, one mesh dimension after the other. Strided ones come
    last, the rightmost first: FSDP2 cuts what tensor parallelism has left each rank. (What torch itself works
    out for them holds only for dimensions that the ranks divide.)
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    offsets, shape = [0] * tensor.dim(), list(tensor.shape)
    cuts = list(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))
    strided = [cut for cut in cuts if isinstance(cut[0], _StridedShard)]
    for place, num, index in [cut for cut in cuts if cut not in strided] + strided[::-1]:
        if place.is_partial():
            raise ForgeError(f"a partial sum ({tensor.placements}) is no part of a tensor: reduce it first")
        if isinstance(place, Shard | _StridedShard):
            size = -(-shape[place.dim] // num)
            start = min(index * size, shape[place.dim])
            offsets[place.dim] += start
            shape[place.dim] = min(size, shape[place.dim] - start)
    box = Box(tuple(offsets), tuple(shape))
    assert tensor.to_local().shape == box.shape, f"{tensor.placements}: {tensor.to_local().shape}, not {box}"
    return box if box.numel else None


def why_not_tiled(boxes: Iterable[Box], shape: Sequence[int]) -> str | None:
    """None where distinct boxes cover each element of a tensor of this shape once, else what is wrong."""
    boxes = list(boxes)
    whole = Box.whole(shape)
    if boxes == [whole]:
        return None
    for box in boxes:
        if not box.is_inside(whole):
            return f"the box of shape {box.shape} at {box.offsets} is outside of the shape {whole.shape}"
    # cut at every edge of any box, the tensor falls into cells that a box has either all or nothing of
    edges = [sorted({e for box in boxes for e in (box.offsets[d], box.stops[d])}) for d in range(len(shape))]
    places = [{edge: i for i, edge in enumerate(along)} for along in edges]
    owners: dict[tuple[int, ...], Box] = {}
    for box in boxes:
        spans = [range(places[d][box.offsets[d]], places[d][box.stops[d]]) for d in range(len(shape))]
        for cell in itertools.product(*spans):
            other = owners.setdefault(cell, box)
            if other is not box:
                return (
                    f"the boxes of shape {other.shape} at {other.offsets} and {box.shape} at {box.offsets} "
                    "overlap"
                )
    covered = sum(box.numel for box in boxes)
    return None if covered == whole.numel else f"the boxes hold {covered} of its {whole.numel} elements"
