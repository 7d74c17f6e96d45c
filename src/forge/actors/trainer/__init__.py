"""[5] The trainer: TitanTrainer and its parts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.actors.trainer.titan import TitanTrainer

__all__ = ["TitanTrainer"]


def __getattr__(name: str) -> Any:
    """TitanTrainer, once it is asked for: the options beside it are read where torch is not wanted yet."""
    if name != "TitanTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forge.actors.trainer.titan import TitanTrainer

    return TitanTrainer
