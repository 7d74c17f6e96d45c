"""What a run has beside its trainer, in a file for each of the trainer's checkpoints.

A checkpoint of the trainer is the commit point: `write` first, then `save_checkpoint(state=its answer)`. A
kill in between leaves a file that nobody names; after a later one both are there.
"""

import hashlib
import io
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from forge.errors import ForgeError

_NAME = re.compile(r"step-(\d+)-updates-(\d+)\.pt")


class LoopFolder:
    """Files step-N-updates-M.pt, each the state after step N as plain data, tensors and Episodes.

    M: the optimizer steps of the trainer then, by which its checkpoints are called. Where steps are skipped,
    several N have the same M.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, num_updates: int, state: dict[str, Any]) -> dict[str, Any]:
        """Writes it to the disk, whole or not at all; returns what the trainer's checkpoint must say."""
        data = io.BytesIO()
        torch.save(state, data)
        self.path.mkdir(parents=True, exist_ok=True)
        named = {"step": step, "num_updates": num_updates}
        final = self._file(named)
        new = final.with_suffix(".new")
        with new.open("wb") as file:
            file.write(data.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, final)
        _sync_folder(self.path)
        return {**named, "sha256": hashlib.sha256(data.getbuffer()).hexdigest()}

    def damage(self, named: dict[str, Any]) -> str | None:
        """What is wrong with the file that a checkpoint names; None: nothing."""
        if "sha256" not in named:
            return "it names no state of a loop"
        file = self._file(named)
        if not file.is_file():
            return f"{file} is missing"
        if hashlib.sha256(file.read_bytes()).hexdigest() != named["sha256"]:
            return f"{file} is not what was written with it"
        return None

    def read(self, named: dict[str, Any]) -> dict[str, Any]:
        """The state that a checkpoint names; raises ForgeError when its file is gone or damaged."""
        damage = self.damage(named)
        if damage is not None:
            raise ForgeError(f"the run can't go on from its checkpoint: {damage}")
        return torch.load(self._file(named), map_location="cpu", weights_only=False)

    def rewind(self, step: int) -> None:
        """Deletes the files of all later steps: the run has gone back, and will write its own."""
        later = [file for file, of, _ in self._files() if of > step]
        for file in (*later, *self.path.glob("*.new")):  # what a kill left of one that was being written
            file.unlink()

    def purge(self, checkpoints: Collection[int]) -> None:
        """Deletes the files that no checkpoint of the trainer names; given are the optimizer steps of those
        that are complete. One that is still being written is newer than these."""
        newest = max(checkpoints, default=0)
        for file, _, num_updates in self._files():
            if num_updates < newest and num_updates not in checkpoints:
                file.unlink()

    def _files(self) -> Iterator[tuple[Path, int, int]]:
        """With step and optimizer steps."""
        for file in list(self.path.glob("step-*")):
            if match := _NAME.fullmatch(file.name):
                yield file, int(match[1]), int(match[2])

    def _file(self, named: dict[str, Any]) -> Path:
        return self.path / f"step-{named['step']}-updates-{named['num_updates']}.pt"


def _sync_folder(path: Path) -> None:
    """A rename is on the disk only when its folder is."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
