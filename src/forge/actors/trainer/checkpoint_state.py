"""What the caller of a trainer saved with a checkpoint, read without the trainer."""

import io
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load

_FACTS = "facts.rank0"  # every checkpoint has those of rank 0


def saved_state(checkpoint: Path) -> dict[str, Any]:
    """The `state` of a checkpoint's folder step-N, as `TitanTrainer.progress` returns it after a resume."""
    stored: dict[str, Any] = {_FACTS: b""}
    with warnings.catch_warnings():  # of no_dist, which is what is wanted
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        load(stored, checkpoint_id=str(checkpoint), no_dist=True)
    return torch.load(io.BytesIO(stored[_FACTS]), map_location="cpu", weights_only=False)["state"]
