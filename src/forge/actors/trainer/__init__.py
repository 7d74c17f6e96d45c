"""[5] The trainer: TitanTrainer and its parts."""

from forge.actors.trainer.titan import TitanTrainer

__all__ = ["TitanTrainer"]
