"""Saving a run and going on with it: one transaction for all that the next step depends on."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apps.grpo.config import GRPOConfig
from apps.grpo.machines import Machines
from apps.grpo.resume import LOOP
from forge.controller import Runtime
from forge.errors import ForgeError
from forge.observability import phase
from forge.observability.metrics import Stat
from forge.rl.saved_loop import LoopFolder
from forge.runs import CHECKPOINTS


class Saves:
    """The checkpoints of a run: the trainer's, each with a file of all else.

    What is saved: episodes that wait, the questions that were asked and have not been answered (work to do
    again), the place in the data, the algorithm's and the checks' state, what was recorded since the last row
    of metrics. The trainer's complete checkpoint is the commit point; it names the file, which was written
    before it.
    """

    def __init__(self, m: Machines, config: GRPOConfig, run: Path, named: dict[str, Any]) -> None:
        """run: its folder. named: what the checkpoint says that it goes on from (`resume_point`)."""
        from forge.actors.trainer.checkpoint_folder import CheckpointFolder  # takes seconds: torch

        self.resumed: int = named.get("step", 0)  # the step after which the run went on
        self._m = m
        self.named = named  # what the newest checkpoint says
        self._options = config.checkpoint
        self._checkpoints = CheckpointFolder(run / CHECKPOINTS)
        self._loops = LoopFolder(run / CHECKPOINTS / LOOP)

    async def restore(self) -> Mapping[str, Stat]:
        """Brings all that is not the trainer's to where the trainer is; returns what had been recorded for
        the next row of metrics."""
        if not self.named:
            return {}
        state = (await self._m.trainer.progress.route()).state
        if state != self.named:
            raise ForgeError(
                f"the trainer goes on after step {state.get('step')}, the run after step {self.resumed}: see "
                "in the log why it did not take that checkpoint, and start again"
            )
        saved = await asyncio.to_thread(self._loops.read, self.named)
        self._loops.rewind(self.resumed)
        await asyncio.gather(
            self._m.buffer.load_state_dict.call_one(saved["buffer"]),
            self._m.dataset.load_state_dict.call_one(saved["dataset"]),
        )
        self._m.load_state_dict(saved)
        return saved["metrics"]

    async def save_if_due(self, step: int) -> None:
        """Every `checkpoint.interval` steps; the next step goes on while the trainer's is written."""
        if self._options.interval and step % self._options.interval == 0:
            with phase("checkpoint"):
                await self._save(step, wait=False)

    async def save(self, step: int) -> None:
        """Returns when the run could go on from here, if not before its first step."""
        await self._save(step, wait=True)

    async def _save(self, step: int, *, wait: bool) -> None:
        if step == self.resumed:
            return
        if step != self.named.get("step"):
            progress, buffer, dataset, metrics = await asyncio.gather(
                self._m.trainer.progress.route(),
                self._m.buffer.state_dict.call_one(),
                self._m.dataset.state_dict.call_one(),
                Runtime.current().recorded(),
            )
            state = {"buffer": buffer, "dataset": dataset, "metrics": metrics, **self._m.state_dict()}
            self._loops.purge(self._checkpoints.steps())
            self.named = await asyncio.to_thread(self._loops.write, step, progress.num_steps, state)
        await self._m.trainer.save_checkpoint.call(self.named, wait=wait)
