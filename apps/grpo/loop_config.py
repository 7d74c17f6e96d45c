"""The keys of the loop: how far rollouts run ahead, what a batch is used for, what outlives a kill."""

from dataclasses import dataclass
from typing import Literal

from apps.sections import OptimizationConfig, at_least

MaxPolicyAge = int | Literal["auto"]


@dataclass(frozen=True, slots=True)
class TrainingConfig(OptimizationConfig):
    """The optimizer's side of a step, and what it has to do with the generator."""

    batch_size: int = 8  # prompts of one step over all ranks; each gives grpo.n_samples completions
    ppo_epochs: int = 1  # times that a step goes over its batch
    minibatches: int = 1  # optimizer steps of each time, on equal parts of the batch
    sync_interval: int = 1  # steps between two updates of the generator's weights

    def __post_init__(self) -> None:
        OptimizationConfig.__post_init__(self)
        at_least(self, 1, "batch_size", "ppo_epochs", "minibatches", "sync_interval")

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one step."""
        return self.ppo_epochs * self.minibatches


@dataclass(frozen=True, slots=True)
class StalenessConfig:
    """What max_policy_age auto may do."""

    limit: int = 4  # steps; no episode older than that is ever trained on, however good the others look

    def __post_init__(self) -> None:
        at_least(self, 1, "limit")


@dataclass(frozen=True, slots=True)
class BufferConfig:
    """Which of the episodes that wait are trained on first, and how often."""

    strategy: Literal["oldest", "newest", "prioritized"] = "oldest"  # prioritized: by advantage
    reuse: int = 1  # times that an episode may be trained on, each time in another step

    def __post_init__(self) -> None:
        at_least(self, 1, "reuse")
