"""Assembly: tensors of the boxes that a reader wants, from the pieces that hold something of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from forge.errors import WeightsMismatch
from forge.weights.box import Box
from forge.weights.cut import Cut
from forge.weights.fingerprint import fingerprint
from forge.weights.manifest import Claim, Manifest, Shards, check_fingerprint
from forge.weights.part import Layout, Part, Piece


@dataclass(frozen=True, slots=True)
class Source:
    """A box that is wanted, and the piece that it is cut out of."""

    piece: Piece
    place: tuple[int, int]  # of the piece: index of its part, and in it
    box: Box  # of the whole tensor, inside the piece's

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.piece.dtype.itemsize

    @property
    def cut(self) -> Cut:
        inner = self.box.relative_to(self.piece.box)
        return Cut(self.piece.start, self.piece.dtype.itemsize, self.piece.box.shape, inner)

    def split(self, nbytes: int) -> Iterator["Source"]:
        """Sources of at most `nbytes` each, or of one element."""
        for box in self.box.split(max(1, nbytes // self.piece.dtype.itemsize)):
            yield replace(self, box=box)


class Assembly:
    """Takes the bytes of every part as they come, in any order, then tells what they make up.

    A box that lies in one piece of an arena that is there as a whole, contiguously, becomes a view of the
    arena; all others are copies.
    """

    def __init__(
        self, manifest: Manifest, parts: Sequence[Part], boxes: Mapping[str, Box] | None = None
    ) -> None:
        """boxes: by tensor; None: every tensor, whole. Of parts that have the same piece the first is read.

        Raises WeightsMismatch for a name that is not of the version and a box that is outside of its tensor.
        """
        for name, box in (boxes or {}).items():
            shape = manifest.facts(name).shape
            if not box.is_inside(Box.whole(shape)):
                raise WeightsMismatch(f"{name}: {box} is wanted of a tensor of the shape {shape}")
        self._manifest = manifest
        self._parts = parts
        wanted = None if boxes is None else tuple(boxes.items())
        self._plan = _plan(tuple(part.layout for part in parts), wanted)
        self._boxes = self._plan.boxes
        self._tensors: dict[str, Tensor] = {}

    def sources(self, part: int) -> Sequence[Source]:
        """What is wanted of the part of this index."""
        return self._plan.by_part[part]

    def take_arena(self, part: int, arena: Tensor) -> None:
        """arena: all bytes of the part, [nbytes] uint8, which this process may keep."""
        for source in self._plan.by_part[part]:
            name, wanted = source.piece.name, self._boxes[source.piece.name]
            found = source.piece.view(arena)
            if source.box != source.piece.box:
                found = found[source.box.relative_to(source.piece.box).slices]
            if source.box == wanted and found.is_contiguous():
                self._tensors[name] = found
            else:
                self._tensor(name)[source.box.relative_to(wanted).slices] = found

    def take(self, sources: Sequence[Source], packed: Tensor) -> None:
        """packed: the bytes of the sources' cuts one behind the other, [sum of nbytes] uint8."""
        for source, data in zip(sources, packed.split([s.nbytes for s in sources]), strict=True):
            wanted = self._boxes[source.piece.name]
            # as bytes, since nothing in `packed` need lie where its dtype demands
            target = self._tensor(source.piece.name).view(-1).view(torch.uint8)
            target = target.view(*wanted.shape, source.piece.dtype.itemsize)
            place = target[source.box.relative_to(wanted).slices]
            place.copy_(data.view(place.shape))

    def finish(self) -> Shards:
        """What has come, by name in the order of the boxes.

        Raises WeightsMismatch, naming the tensor, where the bits of whole pieces are not the published ones.
        """
        tensors = {name: self._tensor(name) for name in self._boxes}
        claims = {name: self._claim(name, tensor) for name, tensor in tensors.items()}
        return Shards(self._manifest.version, self._manifest, tensors, claims)

    def _claim(self, name: str, tensor: Tensor) -> Claim:
        box = self._boxes[name]
        arrived = fingerprint(tensor, self._manifest.tensors[name].shape, box.offsets)
        if name in self._plan.of_whole_pieces:
            places = (source.place for source in self._plan.by_name[name])
            check_fingerprint(name, arrived, sum(self._parts[p].fingerprints[i] for p, i in places))
        return Claim(box, arrived)

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = torch.empty(
                self._boxes[name].shape, dtype=self._manifest.tensors[name].dtype
            )
        return self._tensors[name]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where each of the boxes that are wanted comes from."""

    boxes: dict[str, Box]
    by_part: list[list[Source]]
    by_name: dict[str, list[Source]]
    of_whole_pieces: set[str]  # the tensors whose boxes are, so that they can be proven


@lru_cache(maxsize=8)
def _plan(layouts: tuple[Layout, ...], wanted: tuple[tuple[str, Box], ...] | None) -> _Plan:
    """Every version of a trainer has the same."""
    pieces = [piece for layout in layouts for piece in layout.pieces]
    boxes = dict(wanted) if wanted is not None else {p.name: Box.whole(p.global_shape) for p in pieces}
    plan = _Plan(boxes, [[] for _ in layouts], {name: [] for name in boxes}, set(boxes))
    seen: set[tuple[str, Box]] = set()
    for part, layout in enumerate(layouts):
        for number, piece in enumerate(layout.pieces):
            box = boxes.get(piece.name)
            if box is None or (piece.name, piece.box) in seen:
                continue
            seen.add((piece.name, piece.box))
            common = box if box == piece.box else box.intersection(piece.box)
            if common is None:
                continue
            source = Source(piece, (part, number), common)
            plan.by_part[part].append(source)
            plan.by_name[piece.name].append(source)
            if common != piece.box:
                plan.of_whole_pieces.discard(piece.name)
    return plan


def batches(sources: Sequence[Source], nbytes: int) -> Iterator[list[Source]]:
    """The sources in order, those that are too large in several, as lists of at most `nbytes` each."""
    batch: list[Source] = []
    total = 0
    for source in sources:
        for part in source.split(nbytes):
            if batch and total + part.nbytes > nbytes:
                yield batch
                batch, total = [], 0
            batch.append(part)
            total += part.nbytes
    if batch:
        yield batch
