"""[3] What is taken off a reward, whoever gave it: for too long an answer, for leaving the reference."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forge.data_models import TrainTargets
from forge.errors import ConfigError
from forge.observability.metrics import record
from forge.rl.kl import next_coefficient


def overlong_penalty(length: int, max_tokens: int, cache: int) -> float:
    """What an answer of `length` tokens loses, in [-1, 0] (DAPO, arXiv 2503.14476, eq. 13).

    Nothing up to max_tokens - cache tokens, 1 from max_tokens on, in between in proportion. ConfigError for
    a cache outside [1, max_tokens].
    """
    if not 1 <= cache <= max_tokens:
        raise ConfigError(
            f"overlong_cache must lie in [1, {max_tokens}], the most tokens of an answer, got {cache}"
        )
    return -min(max(length - (max_tokens - cache), 0) / cache, 1.0)


@dataclass(slots=True)
class KLReward:
    """Takes the KL towards a reference out of the reward, rather than adding it to the loss:

    reward - beta * sum_t (log pi_generator(token t) - log pi_ref(token t)), as RLOO does (arXiv 2402.14740).

    beta: per nat. target: nats per token; beta then follows the KL (see forge.rl.kl), once a training step
    (`after_step`). One instance has to shape all rewards of a run.
    """

    beta: float
    target: float | None = None

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise ConfigError(f"beta must not be negative, got {self.beta}")
        if self.target is not None and (self.target <= 0 or self.beta == 0):
            raise ConfigError(
                f"kl_target must be positive, and beta too, which it moves in proportion, got kl_target "
                f"{self.target} and beta {self.beta}"
            )

    def __call__(self, reward: float, logprobs: Tensor, ref_logprobs: Tensor) -> float:
        """The reward less the penalty. logprobs (the generator's), ref_logprobs [T], nats."""
        kl = float((logprobs.double() - ref_logprobs.double()).sum())
        record("reward", kl=kl / len(logprobs), kl_coefficient=self.beta)
        return reward - self.beta * kl

    def after_step(self, targets: Sequence[TrainTargets]) -> None:
        """Once a training step: moves beta by the mean KL per token of its batch, every rank's targets."""
        num_tokens = sum(int(t.loss_mask.sum()) for t in targets)
        if self.target is not None and num_tokens:
            kl = math.fsum(_kl(t) for t in targets) / num_tokens
            self.beta = next_coefficient(self.beta, kl, self.target)

    def state_dict(self) -> dict[str, Any]:
        """What the next step's rewards depend on."""
        return {"beta": self.beta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self.beta = state["beta"]


def _kl(targets: TrainTargets) -> float:
    """Of all tokens together, in nats."""
    assert targets.ref_logprobs is not None, "what is shaped has a reference"
    return float((targets.generator_logprobs.double() - targets.ref_logprobs.double()).sum())
