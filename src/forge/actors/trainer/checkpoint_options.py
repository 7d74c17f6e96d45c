"""What a trainer can be told about its checkpoints."""

from dataclasses import dataclass
from typing import Literal

from forge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Where checkpoints are, and when they are made.

    A trainer starts from the newest complete checkpoint that the folder holds, whatever parallel layout wrote
    it; from the model's own weights when there is none. To start anew, name another folder. All hosts of the
    trainer must see the folder.
    """

    folder: str | None = None  # None: no checkpoints
    interval: int = 100  # optimizer steps between two; 0: on request only
    keep_latest_k: int = 2  # older ones are deleted
    # "async": training goes on once the state is copied to host memory; "disabled": once it is on the disk
    async_mode: Literal["async", "disabled"] = "async"
    # the newest checkpoint to start from, in optimizer steps; later ones become step-N.later. None: any
    load_step: int | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and not self.folder.strip():
            raise ConfigError("checkpoint.folder is empty: name a folder, or leave it out")
        if self.interval < 0:
            raise ConfigError(f"checkpoint.interval must not be negative, got {self.interval}")
        if self.load_step is not None and self.load_step < 0:
            raise ConfigError(f"checkpoint.load_step must not be negative, got {self.load_step}")
        if self.keep_latest_k < 1:
            raise ConfigError(f"checkpoint.keep_latest_k must be at least 1, got {self.keep_latest_k}")
