"""As much of forge.weights as a trainer uses, in a folder: no process starts, and a kill is easy to time."""

import asyncio
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import forge.weights
from forge.weights.box import Box, box_of
from forge.weights.part import Change

_NAME = re.compile(r"v(\d+)\.rank(\d+)of(\d+)")
SLOW_S = 0.3
"""Storing takes longer than the steps beside it."""


@dataclass
class FolderStore:
    """A part that is written is a file `v{version}.rank{rank}of{world_size}`."""

    folder: Path

    def install(self) -> None:
        """Takes the place of forge.weights in this process."""
        self.folder.mkdir(exist_ok=True)
        for name in ("begin_push", "versions", "unfinished", "retire"):
            setattr(forge.weights, name, getattr(self, name))

    async def begin_push(self, version: int, *, rank: int, world_size: int) -> "FolderPush":
        path = self.folder / f"v{version}.rank{rank}of{world_size}"
        assert not path.exists(), f"{path.name} was pushed before"
        return FolderPush(path)

    async def versions(self) -> list[int]:
        return sorted(version for version, is_whole in self._found().items() if is_whole)

    async def unfinished(self) -> list[int]:
        return sorted(version for version, is_whole in self._found().items() if not is_whole)

    async def retire(self, version: int) -> None:
        for path in self.folder.glob(f"v{version}.rank*"):
            path.unlink()

    def _found(self) -> dict[int, bool]:
        parts = [tuple(map(int, m.groups())) for m in map(_NAME.fullmatch, os.listdir(self.folder)) if m]
        sizes = {version: size for version, _, size in parts}
        return {v: n == sizes[v] for v, n in Counter(version for version, _, _ in parts).items()}


@dataclass
class FolderPush:
    path: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def pack(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, change: Change | None = None
    ) -> None:
        for name, tensor in tensors.items():
            local, box = tensor, Box.whole(tensor.shape)
            if isinstance(tensor, DTensor):
                local, box = tensor.to_local(), box_of(tensor)
            if change is not None and box is not None:
                local = change(name, local, box)
            self.tensors[name] = local.to(dtype, copy=True)

    async def fail(self, error: BaseException) -> None:
        raise AssertionError("nothing fails here") from error

    async def publish(self) -> None:
        await asyncio.sleep(SLOW_S)
        partial = self.path.with_name(f"{self.path.name}.partial")
        torch.save(self.tensors, partial)
        os.rename(partial, self.path)
