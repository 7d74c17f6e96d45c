"""Batches whose loss or gradient was not finite, kept in files to look at."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from forge.actors.trainer.micro_batch import MicroBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BadBatch:
    """Everything that went into an optimizer step that was skipped."""

    step: int  # number of the step that it would have been, from 1
    reason: str
    episode_ids: list[str]  # of those that are suspected
    batches: list[MicroBatch]  # inputs and targets of each data-parallel rank, pass by pass


def save_bad_batch(bad: BadBatch, path: Path) -> None:
    """Writes it to a file; a disk without room is only logged, since training can go on."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(bad, path)
    except (OSError, RuntimeError) as error:  # torch.save raises either
        logger.warning("the batch of a skipped step could not be written to %s: %s", path, error)


def load_bad_batch(path: Path | str) -> BadBatch:
    """What a trainer wrote: `load_bad_batch(path).batches` can be given to `forward_backward` again.

    Unpickles, so read only files that you trust.
    """
    bad = torch.load(path, weights_only=False, map_location="cpu")
    assert isinstance(bad, BadBatch), f"{path} holds {type(bad).__name__}"
    return bad
