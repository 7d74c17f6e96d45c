"""Manifest: what a version is made of, and the proof that readers hold just that."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from forge.errors import WeightsMismatch
from forge.weights.box import Box, why_not_tiled
from forge.weights.part import Layout, Part

_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Of one whole tensor, as it was published."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    fingerprint: int


@dataclass(frozen=True, slots=True)
class Claim:
    """What one reader holds of a tensor, and what this adds to the whole tensor's fingerprint."""

    box: Box
    fingerprint: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Small: goes to every reader of a version, also to those that check what others have loaded."""

    version: int
    tensors: dict[str, TensorFacts]
    publisher: str

    @classmethod
    def of(cls, version: int, parts: Sequence[Part], publisher: str) -> "Manifest":
        """From the parts of all ranks; names in the order of the first rank that has them.

        Raises WeightsMismatch, naming the tensor, where pieces contradict each other or don't tile it.
        """
        tensors: dict[str, TensorFacts] = {}
        for name, stored in _stored_tensors(tuple(part.layout for part in parts)).items():
            total = 0
            for box, places in stored.boxes.items():
                found = {parts[part].fingerprints[piece] for part, piece in places}
                if len(found) > 1:
                    raise WeightsMismatch(f"{name}: two ranks hold different values at {box.offsets}")
                total += found.pop()
            tensors[name] = TensorFacts(stored.dtype, stored.shape, total % _MODULUS)
        return cls(version, tensors, publisher)

    def prove(self, claims: Sequence[Mapping[str, Claim]]) -> None:
        """Checks that readers hold together, bit for bit, the whole of every tensor that any of them holds.

        claims: of each reader, by name of the tensor. Readers may hold the same box. Raises WeightsMismatch
        that names the tensor unless the distinct boxes tile it and their bits are the published ones.
        """
        held: dict[str, list[Claim]] = defaultdict(list)
        for reader in claims:
            for name, claim in reader.items():
                held[name].append(claim)
        for name, found in held.items():
            facts = self.facts(name)
            check_fingerprint(name, _sum_tiling(name, found, facts.shape), facts.fingerprint)

    def facts(self, name: str) -> TensorFacts:
        """Raises WeightsMismatch for a tensor that is not of this version."""
        if name not in self.tensors:
            raise WeightsMismatch(
                f"{name}: {self.publisher} published no such tensor, but {len(self.tensors)} others: "
                f"{', '.join(list(self.tensors)[:3])}, ..."
            )
        return self.tensors[name]


@dataclass(frozen=True, slots=True)
class Shards:
    """What a reader has fetched of a version: boxes of tensors, and the claims for `Manifest.prove`."""

    version: int
    manifest: Manifest
    tensors: dict[str, Tensor]
    claims: dict[str, Claim]


def check_fingerprint(name: str, arrived: int, published: int) -> None:
    """Both mod 2^64. Raises WeightsMismatch unless they are equal."""
    arrived, published = arrived % _MODULUS, published % _MODULUS
    if arrived != published:
        raise WeightsMismatch(f"{name}: fingerprint {arrived:016x} arrived, {published:016x} was published")


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: dict[Box, list[tuple[int, int]]]  # that tile it: index of the part and of the piece of each copy


@lru_cache(maxsize=8)
def _stored_tensors(layouts: tuple[Layout, ...]) -> dict[str, _StoredTensor]:
    """By name. Every version of a trainer has the same; raises WeightsMismatch as `Manifest.of` does."""
    found: dict[str, _StoredTensor] = {}
    for part, layout in enumerate(layouts):
        for number, piece in enumerate(layout.pieces):
            kind = piece.dtype, piece.global_shape
            stored = found.setdefault(piece.name, _StoredTensor(*kind, defaultdict(list)))
            if (stored.dtype, stored.shape) != kind:
                raise WeightsMismatch(
                    f"{piece.name}: ranks disagree on dtype or shape: {(stored.dtype, stored.shape)}, {kind}"
                )
            stored.boxes[piece.box].append((part, number))
    for name, stored in found.items():
        if wrong := why_not_tiled(stored.boxes, stored.shape):
            raise WeightsMismatch(f"{name}: {wrong}")
    return found


def _sum_tiling(name: str, held: Sequence[Claim], shape: tuple[int, ...]) -> int:
    """Fingerprint of the tensor that distinct boxes make up; raises WeightsMismatch where they don't."""
    fingerprints: dict[Box, int] = {}
    for claim in held:
        if fingerprints.setdefault(claim.box, claim.fingerprint) != claim.fingerprint:
            raise WeightsMismatch(f"{name}: two ranks hold different values at {claim.box.offsets}")
    if wrong := why_not_tiled(fingerprints, shape):
        raise WeightsMismatch(f"{name}: {wrong}")
    return sum(fingerprints.values()) % _MODULUS
