"""[3] The best version so far: a Hugging Face folder with the step and the score it had."""

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge.rl.evaluation import Evaluation

BEST = "best.json"
"""Within the folder: of which step its weights are, and what they scored."""


@dataclass(frozen=True, slots=True)
class Best:
    """A version of the policy, and its score."""

    step: int
    score: float


class BestKeeper:
    """Keeps the version with the highest score in a folder, with best.json in it; the first of equals.

    Whenever a kill comes, there is one version, whole, with its own best.json; a process that goes on with
    the run finds it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._new = folder.with_name(f"{folder.name}.new")
        if (self._new / BEST).exists():  # a kill came before it took its place
            self._replace()
        file = folder / BEST
        self.best = Best(**json.loads(file.read_text())) if file.exists() else None

    async def offer(self, step: int, evaluation: Evaluation, export: Callable[[str], Awaitable[Any]]) -> bool:
        """Exports the weights if they are the best so far; returns whether they are.

        export: writes the weights that were evaluated to a folder, as `trainer.export.call` does. An
        evaluation that another version than `step` took part in is not of these weights, which are not kept
        for it. Once it has begun, a cancellation comes at its end: the ranks of a trainer write together.
        """
        best = Best(step, evaluation.score)
        if evaluation.versions != [step] or not (self.best is None or best.score > self.best.score):
            return False
        keeping = asyncio.create_task(self._keep(best, export))
        try:
            await asyncio.shield(keeping)
        except asyncio.CancelledError:
            await keeping
            raise
        return True

    async def _keep(self, best: Best, export: Callable[[str], Awaitable[Any]]) -> None:
        shutil.rmtree(self._new, ignore_errors=True)
        await export(str(self._new))
        _write(self._new / BEST, best)
        self._replace()
        self.best = best

    def _replace(self) -> None:
        """Where a kill comes in between, the new folder is whole, and takes the place at the next start."""
        old = self.folder.with_name(f"{self.folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            os.replace(self.folder, old)
        os.replace(self._new, self.folder)
        shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, best: Best) -> None:
    """All of it or nothing: that it is there says that the folder is whole."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(asdict(best), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
