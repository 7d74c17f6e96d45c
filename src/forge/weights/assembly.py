"""Whole tensors from the parts of all ranks, proven to be what was published."""

import itertools
import math
from collections import defaultdict

import torch
from torch import Tensor

from forge.errors import WeightsMismatch
from forge.weights.fingerprint import fingerprint
from forge.weights.manifest import Part, Piece


def assemble(parts: list[tuple[Part, Tensor]]) -> dict[str, Tensor]:
    """Puts every tensor together from (part, its arena) pairs, in the order of the first rank that has it.

    A tensor of which one piece is the whole shares memory with that piece's arena; others are copies.
    Raises WeightsMismatch where pieces contradict each other, don't tile the tensor, or where the bits of
    the result are not those whose fingerprint was published.
    """
    pieces: dict[str, dict[tuple, tuple[Piece, Tensor]]] = defaultdict(dict)
    for part, arena in parts:
        for piece in part.pieces:
            kept, _ = pieces[piece.name].setdefault((piece.offsets, piece.shape), (piece, arena))
            if kept.fingerprint != piece.fingerprint:
                raise WeightsMismatch(
                    f"{piece.name}: two ranks published different values at {piece.offsets}"
                )
    return {name: _assemble_one(name, list(found.values())) for name, found in pieces.items()}


def _assemble_one(name: str, found: list[tuple[Piece, Tensor]]) -> Tensor:
    first, arena = found[0]
    _check_tiling(name, [piece for piece, _ in found])
    if first.is_whole:
        whole = first.view(arena)
    else:
        whole = torch.empty(first.global_shape, dtype=first.dtype)
        for piece, arena in found:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.shape, strict=True))
            whole[box].copy_(piece.view(arena))
    published = sum(piece.fingerprint for piece, _ in found) % (1 << 64)
    arrived = fingerprint(whole, whole.shape, (0,) * whole.dim())
    if arrived != published:
        raise WeightsMismatch(f"{name}: fingerprint {arrived:016x} arrived, {published:016x} was published")
    return whole


def _check_tiling(name: str, pieces: list[Piece]) -> None:
    """Boxes that don't overlap and together count as many elements as the tensor cover it exactly."""
    kinds = {(piece.dtype, piece.global_shape) for piece in pieces}
    if len(kinds) > 1:
        raise WeightsMismatch(f"{name}: ranks disagree on dtype or shape: {sorted(map(str, kinds))}")
    for a, b in itertools.combinations(pieces, 2):
        if all(
            max(i, j) < min(i + m, j + n)
            for i, m, j, n in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True)
        ):
            raise WeightsMismatch(
                f"{name}: the shards of shape {a.shape} at {a.offsets} and {b.shape} at {b.offsets} overlap"
            )
    covered, total = sum(math.prod(p.shape) for p in pieces), math.prod(pieces[0].global_shape)
    if covered != total:
        raise WeightsMismatch(f"{name}: the ranks published {covered} of its {total} elements")
