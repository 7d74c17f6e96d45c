"""The manifest against parts and claims that contradict each other, leave something out or were changed."""

import dataclasses

import pytest
import torch

from forge.errors import WeightsMismatch
from forge.weights.box import Box
from forge.weights.fingerprint import fingerprint
from forge.weights.manifest import Claim, Manifest
from forge.weights.part import Layout, Part, Piece

WHOLE = torch.arange(24, dtype=torch.float32).view(4, 6)


def claim(*corners: int) -> Claim:
    """Rows from the first to before the second number, columns likewise."""
    top, bottom, left, right = corners
    box = Box((top, left), (bottom - top, right - left))
    return Claim(box, fingerprint(WHOLE[box.slices].contiguous(), WHOLE.shape, box.offsets))


def part(name: str, *claims: Claim, dtype: torch.dtype = torch.float32) -> Part:
    pieces = [Piece(name, dtype, (4, 6), c.box, 0) for c in claims]
    return Part(Layout(tuple(pieces)), tuple(c.fingerprint for c in claims))


def damaged(found: Claim) -> Claim:
    return dataclasses.replace(found, fingerprint=found.fingerprint ^ 1)


def manifest() -> Manifest:
    return Manifest.of(7, [part("w", claim(0, 2, 0, 6)), part("w", claim(2, 4, 0, 6))], "the trainer")


def test_a_tensors_fingerprint_is_that_of_the_whole_however_it_was_published() -> None:
    facts = manifest().tensors["w"]
    assert (facts.dtype, facts.shape) == (torch.float32, (4, 6))
    assert facts.fingerprint == claim(0, 4, 0, 6).fingerprint


def test_a_missing_shard_is_a_mismatch_that_names_the_tensor() -> None:
    with pytest.raises(WeightsMismatch, match="w: the boxes hold 12 of its 24 elements"):
        Manifest.of(7, [part("w", claim(0, 2, 0, 6))], "the trainer")


def test_ranks_that_disagree_are_a_mismatch_that_names_the_tensor() -> None:
    whole = claim(0, 4, 0, 6)
    with pytest.raises(WeightsMismatch, match="w: two ranks hold different values"):
        Manifest.of(7, [part("w", whole), part("w", damaged(whole))], "the trainer")
    with pytest.raises(WeightsMismatch, match="w: ranks disagree on dtype or shape"):
        Manifest.of(7, [part("w", whole), part("w", whole, dtype=torch.int32)], "the trainer")
    with pytest.raises(WeightsMismatch, match="w: the boxes of shape .* overlap"):
        Manifest.of(7, [part("w", claim(0, 3, 0, 6)), part("w", claim(2, 4, 0, 6))], "the trainer")


@pytest.mark.parametrize(
    "corners",
    [
        [(0, 4, 0, 6)],
        [(0, 4, 0, 2), (0, 4, 2, 6)],
        [(0, 4, 0, 2), (0, 1, 2, 6), (1, 4, 2, 6)],
        [(0, 4, 0, 6), (0, 4, 0, 6)],
        [(0, 4, 0, 2), (0, 4, 2, 6), (0, 4, 2, 6)],
    ],
)
def test_readers_that_hold_the_whole_together_are_proven(corners: list[tuple[int, ...]]) -> None:
    manifest().prove([{"w": claim(*c)} for c in corners])
    manifest().prove([{}])


def test_readers_that_do_not_are_told_apart_by_name() -> None:
    left, right = claim(0, 4, 0, 2), claim(0, 4, 2, 6)
    for claims, why in [
        ([{"w": left}], "w: the boxes hold 8 of its 24 elements"),
        ([{"w": left}, {}], "w: the boxes hold 8 of its 24 elements"),
        ([{"w": left}, {"w": damaged(right)}], "w: fingerprint"),
        ([{"w": left}, {"w": right}, {"w": damaged(right)}], "w: two ranks hold different values"),
        ([{"w": left}, {"w": claim(0, 4, 1, 6)}], "w: the boxes .* overlap"),
        ([{"v": left}], "v: the trainer published no such tensor, but 1 others: w"),
    ]:
        with pytest.raises(WeightsMismatch, match=why):
            manifest().prove(claims)
