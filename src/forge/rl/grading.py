"""[3] RewardActor and ComputeAdvantages: how good an answer is, and how good beside its group."""

import asyncio
import math
from collections.abc import Callable, Sequence
from itertools import chain, count
from statistics import fmean
from typing import Any

from forge.controller import ForgeActor, endpoint
from forge.errors import ConfigError, RewardError
from forge.observability.metrics import record
from forge.rl.advantage import Baseline, Normalize, check_estimate, estimate, has_variance

RewardFunction = Callable[[str, str, str], float]
"""(prompt, response, target) -> reward."""


class RewardActor(ForgeActor):
    """Grades answers. Pass `reward_functions`, whose mean is the reward, or subclass and override `grade`."""

    def __init__(self, reward_functions: Sequence[RewardFunction] = ()) -> None:
        if not reward_functions and type(self).grade is RewardActor.grade:
            raise ConfigError(
                "RewardActor needs reward_functions=[...], or a subclass that overrides grade()"
            )
        self._functions = named(reward_functions)

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        """The reward of one answer; metadata holds "target" and whatever the caller passed. May be async."""
        return fmean(self._parts(prompt, completion, metadata).values())

    @endpoint
    async def evaluate_response(self, prompt: str, response: str, target: str, **metadata: Any) -> float:
        """The reward of one response, which is recorded. RewardError names the function that raised or gave
        no finite number, the prompt, and the error or the number."""
        parts, reward = await self._graded(prompt, response, {"target": target, **metadata})
        record("reward", **parts, mean=reward)
        return reward

    @endpoint
    async def grade_response(self, prompt: str, response: str, target: str, **metadata: Any) -> float:
        """As `evaluate_response`, for a response that is not trained on: nothing is recorded."""
        _, reward = await self._graded(prompt, response, {"target": target, **metadata})
        return reward

    async def _graded(
        self, prompt: str, response: str, metadata: dict[str, Any]
    ) -> tuple[dict[str, float], float]:
        """What each function gives, by its name, and the reward."""
        if type(self).grade is RewardActor.grade:
            parts = await self.run_blocking(self._parts, prompt, response, metadata)
            return parts, fmean(parts.values())
        name = f"{type(self).__name__}.grade"
        try:
            if asyncio.iscoroutinefunction(self.grade):
                reward = float(await self.grade(prompt, response, metadata))
            else:
                reward = float(await self.run_blocking(self.grade, prompt, response, metadata))
        except RewardError:
            raise
        except Exception as error:  # translated: whatever a user's grade() raises
            raise reward_error(name, prompt, f"raised {type(error).__name__}: {error}") from error
        check_finite(name, prompt, reward)
        return {}, reward

    def _parts(self, prompt: str, completion: str, metadata: dict[str, Any]) -> dict[str, float]:
        return {
            name: _call(name, function, prompt, completion, metadata["target"])
            for name, function in self._functions.items()
        }


class ComputeAdvantages(ForgeActor):
    """Compares the answers of one group; override `compute` for another rule.

    baseline, normalize: see `forge.rl.advantage.estimate`; with "batch_std" the replay buffer whitens the
    whole batch (`normalize_advantages`). ConfigError for a combination that can't be.
    """

    def __init__(self, baseline: Baseline = "group_mean", normalize: Normalize = "group_std") -> None:
        check_estimate(baseline, normalize)
        self._baseline: Baseline = baseline
        self._normalize: Normalize = normalize

    @endpoint
    async def compute(self, rewards: list[float], graded: list[float] | None = None) -> list[float]:
        """Rewards of one group -> advantages, in the same order. graded: the rewards before they were shaped,
        whose variance the metric is about; None: the same."""
        advantages = estimate(rewards, self._baseline, self._normalize)
        record("reward", zero_variance_groups=float(not has_variance(graded or rewards)))
        return advantages


def name_of(function: Callable[..., Any]) -> str:
    """The name a reward function goes by in metrics: its own, or its class's."""
    return getattr(function, "__name__", type(function).__name__)


def named(functions: Sequence[RewardFunction]) -> dict[str, RewardFunction]:
    """By the names in metrics; those that have the same one are numbered: f, f_2, f_3."""
    names: dict[str, RewardFunction] = {}
    for function in functions:
        name = name_of(function)
        numbered = chain([name], (f"{name}_{i}" for i in count(2)))
        names[next(free for free in numbered if free not in names)] = function
    return names


def reward_error(name: str, prompt: str, problem: str) -> RewardError:
    """One line: which function did what, for which prompt."""
    shown = prompt if len(prompt) <= 200 else f"{prompt[:200]}..."
    return RewardError(f"reward function {name} {problem} for prompt {shown!r}")


def check_finite(name: str, prompt: str, reward: float) -> None:
    """RewardError for NaN and infinity: a group with one of them can't be compared."""
    if not math.isfinite(reward):
        rule = "rewards must be finite: give 0.0, say, to an answer that can't be graded"
        raise reward_error(name, prompt, f"gave the reward {reward} ({rule})")


def _call(name: str, function: RewardFunction, prompt: str, response: str, target: str) -> float:
    try:
        reward = float(function(prompt, response, target))
    except Exception as error:  # translated: whatever a user's reward function raises
        problem = f"raised {type(error).__name__}: {error}"
        raise reward_error(name, prompt, problem) from error
    check_finite(name, prompt, reward)
    return reward
