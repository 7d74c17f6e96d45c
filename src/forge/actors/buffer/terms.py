"""[4] Terms: what a replay buffer promises."""

from dataclasses import dataclass
from typing import Literal, get_args

from forge.errors import ConfigError

Strategy = Literal["oldest", "newest", "prioritized"]


@dataclass(frozen=True, slots=True)
class Terms:
    """num_per_step: episodes of a training step; max_policy_age: versions that the trainer may be ahead of
    the policy that sampled what it trains on; reuse: times that an episode may be handed out, once a version;
    max_episodes: that may wait before others have to wait to be added, None: any number; num_steps: training
    steps of the run, None: no end.

    Raises ConfigError for terms that no buffer can keep.
    """

    num_per_step: int
    max_policy_age: int
    sync_interval: int = 1
    strategy: Strategy = "oldest"
    reuse: int = 1
    max_episodes: int | None = None
    num_steps: int | None = None

    def __post_init__(self) -> None:
        age, interval = self.max_policy_age, self.sync_interval
        if self.strategy not in get_args(Strategy):
            raise ConfigError(
                f"strategy must be one of {', '.join(get_args(Strategy))}, got {self.strategy!r}"
            )
        if age < interval - 1:
            raise ConfigError(
                f"max_policy_age={age} is too small for sync_interval={interval}: the policy is up to "
                f"{interval - 1} versions old before each update; raise it, or sync more often"
            )
        if not 1 <= self.reuse <= age + 1:
            raise ConfigError(
                f"reuse={self.reuse} must be from 1 to max_policy_age + 1 = {age + 1}: an episode is in one "
                "batch of a version at most, and is too old after so many; training.ppo_epochs trains on the "
                "same batch several times"
            )
        if self.num_steps is not None and self.num_steps < 1:
            raise ConfigError(
                f"num_steps must be 1 or more, or None for a run without end, got {self.num_steps}"
            )
        if self.max_episodes is not None:
            self.check_batch(self.num_per_step)

    def check_batch(self, num_episodes: int) -> None:
        """Raises ConfigError for a batch that may never come together."""
        if self.max_episodes is not None and num_episodes > self.max_episodes:
            raise ConfigError(
                f"max_episodes={self.max_episodes} is less than the {num_episodes} episodes of a batch, "
                "which would never come together: raise it, or leave it out"
            )

    def check_bound(self, age: int) -> None:
        """Raises ConfigError for an age that rollouts can't be let in by."""
        if not self.sync_interval - 1 <= age <= self.max_policy_age:
            raise ConfigError(
                f"the bound must be from sync_interval - 1 = {self.sync_interval - 1} to the hard limit "
                f"max_policy_age = {self.max_policy_age}, got {age}"
            )
