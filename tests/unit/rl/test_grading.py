"""RewardActor: whose function is called with what, and what happens when it raises."""

import asyncio
import math
from typing import Any

import pytest

from forge.errors import ConfigError, RewardError
from forge.observability.metrics import drain, merge
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


def test_functions_that_have_one_name_all_count() -> None:
    actor = RewardActor(reward_functions=[lambda p, r, t: 1.0, lambda p, r, t: 0.0, lambda p, r, t: 0.5])
    drain()
    assert asyncio.run(actor.evaluate_response(prompt="p", response="r", target="t")) == 0.5
    rows = merge([drain()])
    assert rows == {
        "reward/<lambda>": 1,
        "reward/<lambda>_2": 0,
        "reward/<lambda>_3": 0.5,
        "reward/mean": 0.5,
    }


def test_what_is_not_trained_on_gets_the_same_reward_and_no_metric() -> None:
    actor = RewardActor(reward_functions=[length, Equals()])
    drain()
    assert asyncio.run(actor.grade_response(prompt="p", response="abc", target="abc")) == 2.0
    assert not drain()
    assert asyncio.run(actor.evaluate_response(prompt="p", response="abc", target="abc")) == 2.0
    assert merge([drain()]) == {"reward/Equals": 1, "reward/length": 3, "reward/mean": 2}


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


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_reward_that_is_not_a_finite_number_is_refused(value: float) -> None:
    def odd(prompt: str, response: str, target: str) -> float:
        return value

    class Mine(RewardActor):
        def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
            return value

    problem = "raised TypeError: .*" if value is None else f"gave the reward {value} .*"
    for actor, name in ((RewardActor(reward_functions=[length, odd]), "odd"), (Mine(), "Mine.grade")):
        drain()
        with pytest.raises(RewardError, match=f"^reward function {name} {problem} for prompt 'p'$"):
            asyncio.run(actor.evaluate_response(prompt="p", response="", target=""))
        assert not drain()  # nor does it become NaN in the metrics of the step


def test_a_reward_actor_without_a_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs reward_functions"):
        RewardActor()


def test_advantages_come_back_in_order() -> None:
    got = asyncio.run(ComputeAdvantages().compute([0.0, 1.0]))
    assert got[0] == pytest.approx(-got[1]) and got[1] > 0.99


def test_advantages_are_compared_as_asked_for_and_groups_without_variance_are_counted() -> None:
    drain()
    actor = ComputeAdvantages("leave_one_out", "none")
    assert asyncio.run(actor.compute([3.0, 0.0, 0.0])) == pytest.approx([3.0, -1.5, -1.5])
    assert asyncio.run(actor.compute([1.0, 1.0])) == [0.0, 0.0]
    assert merge([drain()])["reward/zero_variance_groups"] == 0.5
    asyncio.run(actor.compute([0.9, 1.0], [1.0, 1.0]))  # shaped, and as they were
    assert merge([drain()])["reward/zero_variance_groups"] == 1
    with pytest.raises(ConfigError, match="normalize group_std needs a baseline"):
        ComputeAdvantages("none", "group_std")
