"""CheckOptions: what follows when an invariant is broken, and where it begins to be."""

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

from forge.errors import ConfigError

Consequence = Literal["off", "warn", "reject", "stop"]
"""Not looked at; a line in the log; the group is replaced by that of another question; the run ends."""

Told = Literal["off", "warn", "stop"]
"""Of what no group can be replaced for."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far numbers may be apart that rounding alone makes differ."""

    logprob_gap: float  # mean |log p_trainer - log p_generator| of an episode, in nats
    reference_kl: float  # mean KL of an episode, nats per token
    gradient_error: float  # relative


ROUNDING = {"bfloat16": Limits(0.2, 0.01, 0.05), "float32": Limits(0.01, 1e-4, 1e-3)}
"""By the dtype of all computation. SmolLM2-135M in bfloat16 has gaps of 0.04 and KLs of 1e-5."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What follows when an invariant of the run does not hold.

    Where the library's own books don't add up the run ends; a sample that can't be learnt from is replaced;
    what is measured is told.
    """

    logprobs: Consequence = "reject"  # every token has one, finite and not above 0
    completions: Consequence = "reject"  # have tokens, and an end: an end token, or max_tokens reached
    reward_range: Consequence = "stop"  # rewards are finite, and within reward_min and reward_max
    truncation: Told = "warn"  # not nearly all completions are cut at max_tokens
    zero_variance: Told = "warn"  # now and then rewards of a group differ
    reward_drift: Told = "warn"  # the mean reward does not jump
    token_counts: Told = "stop"  # what was generated is what is trained on, token for token
    age: Told = "stop"  # no episode of a batch is older than max_policy_age, none newer than the trainer
    reuse: Told = "stop"  # no episode is trained on more often than buffer.reuse
    reference_kl: Told = "warn"  # before the first update policy and reference are one model
    ratio: Told = "warn"  # trainer and generator agree on samples of the trainer's own version
    gradient_scale: Told = "warn"  # the gradient of the first batch does not depend on its micro-batches

    reward_min: float | None = None  # smallest reward that there can be; null: any
    reward_max: float | None = None  # largest; null: any
    max_truncated: float = 0.95  # share of 512 completions that may be cut at max_tokens
    zero_variance_groups: int = 64  # groups in a row that are too many
    max_logprob_gap: float | None = None  # nats, mean of an episode; null: 0.2 in bfloat16, 0.01 in float32
    max_reference_kl: float | None = None  # nats per token, of an episode; null: 0.01, 1e-4 in float32
    max_gradient_error: float | None = None  # of the gradient's norm, relative; null: 0.05, 1e-3 in float32

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if get_origin(f.type) is Literal and value not in get_args(f.type):
                raise ConfigError(f"{f.name} must be one of {', '.join(get_args(f.type))}, got {value!r}")
        low, high = self.reward_min, self.reward_max
        if low is not None and high is not None and low >= high:
            raise ConfigError(f"reward_min must be below reward_max {high}, got {low}")
        if not 0 < self.max_truncated <= 1:
            raise ConfigError(f"max_truncated must lie in (0, 1], got {self.max_truncated}")
        if self.zero_variance_groups < 1:
            raise ConfigError(f"zero_variance_groups must be at least 1, got {self.zero_variance_groups}")
        for name in ("max_logprob_gap", "max_reference_kl", "max_gradient_error"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0, got {value}")

    def limits(self, dtype: str) -> Limits:
        """The last three, for a model that computes in `dtype`."""
        rounding = ROUNDING["float32" if dtype == "float32" else "bfloat16"]
        return Limits(
            self.max_logprob_gap or rounding.logprob_gap,
            self.max_reference_kl or rounding.reference_kl,
            self.max_gradient_error or rounding.gradient_error,
        )
