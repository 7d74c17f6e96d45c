"""RewardActor: whose function is called with what, and what happens when it raises."""

import asyncio
from typing import Any

import pytest

from forge.errors import ConfigError, RewardError
from forge.rl.grading import ComputeAdvantages, RewardActor


def length(prompt: str, response: str, target: str) -> float:
    return len(response)


class Equals:
    def __call__(self, prompt: str, response: str, target: str) -> float:
        return float(response == target)


def broken(prompt: str, response: str, target: str) -> float:
    raise ZeroDivisionError("by nought")


def test_the_reward_is_the_mean_of_the_functions() -> None:
    actor = RewardActor(reward_functions=[length, Equals()])
    assert asyncio.run(actor.evaluate_response(prompt="p", response="abc", target="abc")) == 2.0
    assert asyncio.run(actor.evaluate_response(prompt="p", response="abc", target="x")) == 1.5


def test_a_subclass_grades_by_its_own_rule_with_metadata() -> None:
    class Mine(RewardActor):
        def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
            return len(prompt) + len(completion) + len(metadata["target"]) + metadata["bonus"]

    class Async(RewardActor):
        async def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:  # pyright: ignore
            return 7

    assert asyncio.run(Mine().evaluate_response("pp", "c", "ttt", bonus=10)) == 16
    assert asyncio.run(Async().evaluate_response("pp", "c", "ttt")) == 7


def test_an_error_names_the_function_the_prompt_and_the_error() -> None:
    actor = RewardActor(reward_functions=[broken])
    with pytest.raises(
        RewardError, match="broken raised ZeroDivisionError: by nought for prompt 'what is 1/0'"
    ):
        asyncio.run(actor.evaluate_response(prompt="what is 1/0", response="", target=""))

    class Mine(RewardActor):
        def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
            return metadata["nothing"]

    with pytest.raises(RewardError, match="Mine.grade raised KeyError: 'nothing'"):
        asyncio.run(Mine().evaluate_response(prompt="p", response="", target=""))


def test_a_reward_actor_without_a_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs reward_functions"):
        RewardActor()


def test_advantages_come_back_in_order() -> None:
    got = asyncio.run(ComputeAdvantages().compute([0.0, 1.0]))
    assert got[0] == pytest.approx(-got[1]) and got[1] > 0.99
