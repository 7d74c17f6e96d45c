"""Part: what one rank publishes of a version, as pieces of tensors packed into one flat arena."""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge.errors import ForgeError
from forge.weights.box import Box, box_of
from forge.weights.fingerprint import copy_and_fingerprint, first_byte

_ALIGNMENT = 64  # bytes: a cache line

Change = Callable[[str, Tensor, Box], Tensor]
"""Name, local tensor and its box -> what is stored in its place, of the same shape."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one tensor, all of it or a shard, and where its bytes lie in the arena of its part."""

    name: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    box: Box
    start: int  # first byte in the arena

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize

    def view(self, arena: Tensor) -> Tensor:
        """The piece as a tensor that shares memory with the arena [nbytes] uint8."""
        return arena[self.start : self.start + self.nbytes].view(self.dtype).view(self.box.shape)


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """What lies where in an arena. In a reader the parts of all versions share one, so that what follows from
    it is worked out once."""

    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Of the arena, as far as anything lies in it."""
        return max((piece.start + piece.nbytes for piece in self.pieces), default=0)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has published: an index of its arena."""

    layout: Layout
    fingerprints: tuple[int, ...]  # of the pieces: what each box adds to the whole tensor's fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (pickle.dumps(self.layout.pieces), self.fingerprints)


def _restored(pieces: bytes, fingerprints: tuple[int, ...]) -> Part:
    return Part(_layout(pieces), fingerprints)


@lru_cache(maxsize=1024)  # ranks of a trainer, so that a reader knows what it has met before
def _layout(pieces: bytes) -> Layout:
    return Layout(pickle.loads(pieces))


def plan_pieces(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> tuple[list[tuple[Piece, Tensor]], int]:
    """Places what this rank is to store; returns (piece, local tensor) pairs and the bytes needed.

    Of a DTensor that is the local shard, left out where another rank of its mesh stores the same. A plain
    tensor is stored whole by every rank that has it: a rank can't know whether another one does.

    dtype: what floating point tensors are stored as; None: as they are.
    """
    placed: list[tuple[Piece, Tensor]] = []
    end = 0
    for name, tensor in tensors.items():
        shard = _own_shard(name, tensor)
        if shard is None:
            continue
        local, box = shard
        stored_as = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        # A word of the whole tensor stays a word in the arena, so that the fingerprint reads it in place.
        phase = first_byte(stored_as.itemsize, tensor.shape, box.offsets) % 8
        start = -(-end // _ALIGNMENT) * _ALIGNMENT + phase
        piece = Piece(name, stored_as, tuple(tensor.shape), box, start)
        placed.append((piece, local))
        end = start + piece.nbytes
    return placed, max(end, _ALIGNMENT)


def _own_shard(name: str, tensor: Tensor) -> tuple[Tensor, Box] | None:
    """What this rank is to store of a tensor; None where that is nothing, or another rank does."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), Box.whole(tensor.shape)
    try:
        box = box_of(tensor)
    except ForgeError as error:
        raise ForgeError(f"{name}: {error}") from None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or (box is None and (tensor.numel() or any(coordinate))):
        return None
    if box is None:  # one rank says that there is nothing in it
        return tensor.to_local().new_empty(tensor.shape), Box.whole(tensor.shape)
    if any(p.is_replicate() and i > 0 for p, i in zip(tensor.placements, coordinate, strict=True)):
        return None
    return tensor.to_local().detach(), box


def pack(placed: list[tuple[Piece, Tensor]], arena: Tensor, change: Change | None = None) -> Part:
    """Copies the local tensors, changed, into the arena, [nbytes] uint8, and takes their fingerprints on the
    way."""
    fingerprints = []
    for piece, local in placed:
        try:
            local = local if change is None else change(piece.name, local, piece.box)
            value = copy_and_fingerprint(piece.view(arena), local, piece.global_shape, piece.box.offsets)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise ForgeError(f"{piece.name} can't be packed: {error}") from error
        fingerprints.append(value)
    return Part(Layout(tuple(piece for piece, _ in placed)), tuple(fingerprints))
