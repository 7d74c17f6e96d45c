"""Cut: the bytes of an arena that a reader wants, so that the volume sends these and no others."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge.weights.box import Box


@dataclass(frozen=True, slots=True)
class Cut:
    """A box of an array that lies in an arena row by row."""

    start: int  # first byte of the array in the arena
    itemsize: int  # bytes
    shape: tuple[int, ...]  # of the array
    box: Box  # within the array

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.itemsize

    def view(self, arena: Tensor) -> Tensor:
        """The cut's bytes [*box.shape, itemsize] uint8 in the arena [nbytes] uint8; nothing is copied."""
        end = self.start + Box.whole(self.shape).numel * self.itemsize
        return arena[self.start : end].view(*self.shape, self.itemsize)[self.box.slices]


def gather(arena: Tensor, cuts: Sequence[Cut], packed: Tensor) -> None:
    """Copies the cuts one behind the other into `packed`, [sum of their nbytes] uint8."""
    places = torch.split(packed, [cut.nbytes for cut in cuts])
    for cut, place in zip(cuts, places, strict=True):
        source = cut.view(arena)
        place.view(source.shape).copy_(source)
