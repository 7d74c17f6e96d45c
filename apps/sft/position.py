"""Where in the data a run stands, as it is saved with the trainer's checkpoints."""

from dataclasses import asdict, dataclass
from typing import Any

from apps.sft.config import SFTConfig
from forge.data.chat_dataset import ChatSizes
from forge.data.rows import Position
from forge.data_models import Progress
from forge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """After a step: its number, 0 before the first, and where the next batch begins in which data."""

    step: int
    position: Position
    data: dict[str, Any]  # what the position counts in, and what the weights began as

    def after(self, position: Position) -> "Place":
        """One step later."""
        return Place(self.step + 1, position, self.data)

    def state(self) -> dict[str, Any]:
        """What the trainer keeps with its checkpoints."""
        return asdict(self)


def place_of(progress: Progress, config: SFTConfig, sizes: ChatSizes) -> Place:
    """Where the checkpoint left off, or the beginning. Raises ConfigError where it was made with another
    model, data or batches: its position and its steps would mean nothing there."""
    data = {
        "dataset.path": config.dataset.path,
        "dataset.name": config.dataset.name,
        "dataset.split": config.dataset.split,
        "model": config.model,
        "training.batch_size": config.training.batch_size,
        "seed": config.seed,
        "conversations": sizes.train,
    }
    state = progress.state
    if not state:
        return Place(0, Position(), data)
    for key, value in data.items():
        if state["data"][key] != value:
            raise ConfigError(
                f"the run to resume was trained with {key} {state['data'][key]!r}, now it is {value!r}, and "
                "can't go on from its place: set it back, or start a new run"
            )
    return Place(state["step"], Position(**state["position"]), data)
