"""[3] RewardActor and ComputeAdvantages: how good an answer is, and how good beside its group."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from forge.controller import ForgeActor, endpoint
from forge.errors import ConfigError, RewardError
from forge.observability.metrics import record
from forge.rl.advantage import group_advantages

RewardFunction = Callable[[str, str, str], float]
"""(prompt, response, target) -> reward."""


class RewardActor(ForgeActor):
    """Grades answers. Pass `reward_functions`, whose mean is the reward, or subclass and override `grade`."""

    def __init__(self, reward_functions: Sequence[RewardFunction] = ()) -> None:
        if not reward_functions and type(self).grade is RewardActor.grade:
            raise ConfigError(
                "RewardActor needs reward_functions=[...], or a subclass that overrides grade()"
            )
        self._functions = list(reward_functions)

    def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
        """The reward of one answer; metadata holds "target" and whatever the caller passed. May be async."""
        parts = {
            name_of(function): _call(function, prompt, completion, metadata["target"])
            for function in self._functions
        }
        record("reward", **parts)
        return sum(parts.values()) / len(parts)

    @endpoint
    async def evaluate_response(self, prompt: str, response: str, target: str, **metadata: Any) -> float:
        """The reward of one response. RewardError names the function, the prompt and the error."""
        arguments = (prompt, response, {"target": target, **metadata})
        try:
            if asyncio.iscoroutinefunction(self.grade):
                reward = await self.grade(*arguments)
            else:
                reward = await self.run_blocking(self.grade, *arguments)
        except RewardError:
            raise
        except Exception as error:  # translated: whatever a user's grade() raises
            raise reward_error(f"{type(self).__name__}.grade", prompt, error) from error
        record("reward", mean=reward)
        return float(reward)


class ComputeAdvantages(ForgeActor):
    """Compares the answers of one group; override `compute` for another rule."""

    @endpoint
    async def compute(self, rewards: list[float]) -> list[float]:
        """Rewards of one group -> advantages, in the same order."""
        advantages = group_advantages(rewards)
        record("reward", zero_variance_groups=float(max(rewards) == min(rewards)))
        return advantages


def name_of(function: Callable[..., Any]) -> str:
    """The name a reward function goes by in metrics: its own, or its class's."""
    return getattr(function, "__name__", type(function).__name__)


def reward_error(name: str, prompt: str, error: Exception) -> RewardError:
    """One line: which function raised what, for which prompt."""
    shown = prompt if len(prompt) <= 200 else f"{prompt[:200]}..."
    return RewardError(f"reward function {name} raised {type(error).__name__}: {error} for prompt {shown!r}")


def _call(function: RewardFunction, prompt: str, response: str, target: str) -> float:
    try:
        return float(function(prompt, response, target))
    except Exception as error:  # translated: whatever a user's reward function raises
        raise reward_error(name_of(function), prompt, error) from error
