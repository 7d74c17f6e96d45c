"""Part: what one rank publishes of a version, as pieces of tensors packed into one flat arena."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forge.errors import ForgeError
from forge.weights.fingerprint import fingerprint, first_byte

_ALIGNMENT = 64  # bytes: a cache line


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one tensor, all of it or a shard, and where its bytes lie in the arena of its part."""

    name: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]  # of the box in the whole tensor
    shape: tuple[int, ...]  # of the box
    start: int  # first byte in the arena
    fingerprint: int = 0  # what the box adds to the whole tensor's fingerprint

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        return self.shape == self.global_shape

    def view(self, arena: Tensor) -> Tensor:
        """The piece as a tensor that shares memory with the arena [nbytes] uint8."""
        return arena[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has published: an index of its arena, which is stored as chunks of equal size."""

    pieces: tuple[Piece, ...]
    nbytes: int
    chunk_nbytes: int

    @property
    def num_chunks(self) -> int:
        return math.ceil(self.nbytes / self.chunk_nbytes)


def plan_pieces(tensors: Mapping[str, Tensor]) -> tuple[list[tuple[Piece, Tensor]], int]:
    """Places what this rank is to store; returns (piece, local tensor) pairs and the bytes needed.

    Of a DTensor that is the local shard, left out where another rank of its mesh stores the same. A plain
    tensor is stored whole by every rank that has it: a rank can't know whether another one does.
    """
    placed: list[tuple[Piece, Tensor]] = []
    end = 0
    for name, tensor in tensors.items():
        box = _local_box(name, tensor)
        if box is None:
            continue
        local, offsets = box
        # A word of the whole tensor stays a word in the arena, so that the fingerprint reads it in place.
        phase = first_byte(tensor.dtype.itemsize, tensor.shape, offsets) % 8
        start = -(-end // _ALIGNMENT) * _ALIGNMENT + phase
        piece = Piece(name, tensor.dtype, tuple(tensor.shape), offsets, tuple(local.shape), start)
        placed.append((piece, local))
        end = start + piece.nbytes
    return placed, max(end, _ALIGNMENT)


def _local_box(name: str, tensor: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.dim()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    for place, index in zip(tensor.placements, coordinate, strict=True):
        if place.is_partial():
            raise ForgeError(f"{name} is a partial sum ({tensor.placements}): reduce it before publishing")
        if place.is_replicate() and index > 0:
            return None
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local().detach()
    assert tuple(local.shape) == tuple(shape), f"{name}: shard {tuple(local.shape)}, expected {shape}"
    return (local, tuple(offsets)) if local.numel() else None


def pack(placed: list[tuple[Piece, Tensor]], arena: Tensor) -> tuple[Piece, ...]:
    """Copies the local tensors into the arena, [nbytes] uint8, and takes their fingerprints on the way."""
    pieces = []
    for piece, local in placed:
        stored = piece.view(arena)
        stored.copy_(local)
        value = fingerprint(stored, piece.global_shape, piece.offsets)
        pieces.append(dataclasses.replace(piece, fingerprint=value))
    return tuple(pieces)
