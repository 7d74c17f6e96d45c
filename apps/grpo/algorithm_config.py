"""The keys of the algorithm beside its loss."""

from dataclasses import dataclass
from typing import Literal

from apps.sections import above_zero, at_least
from forge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """What is sampled, and what is no part of the loss: where null, as the paper of the loss has it."""

    n_samples: int = 8  # completions of one prompt, compared with each other
    temperature: float = 1.0  # of the sampling
    max_tokens: int = 512  # longest completion, in tokens
    baseline: Literal["group_mean", "leave_one_out", "none"] | None = None  # is taken from each reward
    normalize: Literal["group_std", "batch_std", "none"] | None = None  # the difference is divided by it
    dynamic_sampling: bool | None = None  # asks another prompt where all completions earn the same
    overlong_cache: int | None = None  # last tokens before max_tokens, in which longer is worse; 0: none
    kl_in: Literal["loss", "reward"] = "loss"  # where the KL term stands

    def __post_init__(self) -> None:
        at_least(self, 1, "n_samples", "max_tokens")
        above_zero(self, "temperature")
        if self.overlong_cache is not None and not 0 <= self.overlong_cache <= self.max_tokens:
            raise ConfigError(
                f"overlong_cache must lie in [0, max_tokens {self.max_tokens}], got {self.overlong_cache}"
            )
