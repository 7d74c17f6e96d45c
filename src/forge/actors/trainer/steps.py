"""Steps: the learner's, of which one that is not finite is skipped."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forge.actors.trainer.bad_batches import BadBatch, save_bad_batch
from forge.actors.trainer.micro_batch import MicroBatch
from forge.data_models import ForwardBackwardResult
from forge.errors import NotFinite

if TYPE_CHECKING:
    from forge.actors.trainer.learner import Learner

logger = logging.getLogger(__name__)

SKIPPED = {"skipped": 1.0}


class Steps:
    """Does optimizer steps, or leaves out those with a loss or gradient that is NaN or infinite.

    A skipped step touches neither weights nor optimizer nor schedule, on any rank. It is told in the log,
    and its batch is written to a file. After `max_skipped` in a row the next one raises NotFinite. Where a
    step is made of several `forward_backward`, one that is not finite spoils all up to the `optim_step`.
    """

    def __init__(
        self, learner: "Learner", *, max_skipped: int = 0, folder: Path | None = None, rank: int = 0
    ) -> None:
        """folder: where the batches are written, by rank 0; None: nowhere."""
        self._learner = learner
        self._max_skipped = max_skipped
        self._folder = folder
        self._speaks = rank == 0
        self._gathered: list[MicroBatch] = []  # since the last update
        self._spoiled = False
        self.num_skipped = 0  # in a row

    @property
    def under_way(self) -> bool:
        """Whether something was gathered that no `optim_step` has used."""
        return bool(self._gathered) or self._spoiled

    def forward_backward(self, batches: Sequence[MicroBatch]) -> ForwardBackwardResult:
        """One pass; NaN and the metric "skipped" when it is not finite."""
        self._gathered += batches
        try:
            result = self._learner.forward_backward(batches)
        except NotFinite as error:
            self._spoil(error)
            return ForwardBackwardResult(math.nan, dict(SKIPPED))
        if self._spoiled:
            self._learner.forget()
        return result

    def optim_step(self) -> dict[str, float]:
        """The update; only the metric "skipped" when the step is left out."""
        num_steps = self._learner.num_steps
        if not self._spoiled:
            try:
                return self._learner.optim_step()
            except NotFinite as error:
                self._spoil(error)
            finally:
                if self._learner.num_steps > num_steps:  # whatever the loss made of that
                    self._gathered, self.num_skipped = [], 0
        self._gathered, self._spoiled = [], False
        return dict(SKIPPED)

    def forget(self) -> None:
        """Drops what was gathered."""
        self._learner.forget()
        self._gathered, self._spoiled = [], False

    def _spoil(self, error: NotFinite) -> None:
        """The step will be skipped; raises when it is one too many."""
        self._learner.forget()
        if not self._spoiled:
            self.num_skipped += 1
        self._spoiled = True
        told = str(error) + self._keep(error)
        if self.num_skipped > self._max_skipped:
            in_a_row = f", {self.num_skipped} steps in a row" if self.num_skipped > 1 else ""
            raise NotFinite(
                f"{told}{in_a_row}; training.max_skipped_steps is {self._max_skipped}", error.episode_ids
            )
        if self._speaks:
            logger.warning("step %d is skipped: %s", self._learner.num_steps + 1, told)

    def _keep(self, error: NotFinite) -> str:
        """Writes the batch to a file; says where it is."""
        if self._folder is None or not self._speaks:
            return ""
        step = self._learner.num_steps + 1
        path = self._folder / f"step-{step}.attempt-{self.num_skipped}.pt"
        save_bad_batch(BadBatch(step, str(error), error.episode_ids, self._gathered), path)
        return f" (the batch: {path})"
