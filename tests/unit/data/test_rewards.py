"""Scores against answers that a person would give."""

import pickle
import time

import pytest

from forge.data.rewards import ExactMatchReward, MathReward, ThinkingReward
from forge.errors import ConfigError

RIGHT = [
    # (response, target)
    ("18", "18"),
    ("18.", "18"),
    ("The answer is 18.", "18"),
    ("The answer is **18**.", "18"),
    ("3 + 4 = 7", "7"),
    ("3+4=7", "7"),
    ("16 - 3 - 4 = <<16-3-4=9>>9 eggs\n#### 18", "18"),
    ("#### 18\nIs there anything else, like 5 more?", "18"),
    ("It costs $18.00", "18"),
    ("It costs US$18", "18"),
    ("It costs \\$18", "18"),
    ("1,234,567 people", "1234567"),
    ("$1,200.50", "1200.5"),
    ("1{,}200", "1200"),
    ("That is 50%", "50"),
    ("That is 50\\%", "50%"),
    ("5 - 9 = -4", "-4"),
    ("5 - 9 = \u22124", "-4"),
    ("a loss of -$5", "-5"),
    ("a loss of $-5", "-5"),
    ("Answer:-5", "-5"),
    ("0.5", "1/2"),
    ("one half, 1/2", "0.5"),
    ("-3/4", "-0.75"),
    ("3 / 4", "0.75"),
    ("\\frac{3}{4}", "0.75"),
    ("-\\dfrac{3}{4}", "-3/4"),
    (".5", "0.5"),
    ("1e3", "1000"),
    ("007", "7"),
    ("0", "-0"),
    ("18 apples", "#### 18"),
    ("the result is \\boxed{42}, not 43", "42"),
    ("\\boxed{1} or rather \\boxed{2}", "2"),
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("\\boxed{\\text{about } {42}}", "42"),
    ("$\\boxed{x = 5}$ and 6", "5"),
    ("\\boxed{7} and then \\boxed{9", "7"),
    ("<answer>7</answer> because 3 + 5 is 8", "7"),
    ("<ANSWER>\n 7 \n</ANSWER>", "7"),
    ("<answer>8</answer> no, <answer>7</answer>", "7"),
    ("<answer>8</answer> \\boxed{7} #### 9", "7"),
    ("<answer>7</answer> #### 9", "7"),
    ("答案是18", "18"),
    ("123456789012345678901", "123456789012345678901"),
]

WRONG = [
    ("", "18"),
    ("I don't know.", "18"),
    ("eighteen", "18"),
    ("81", "18"),
    ("18 is not it, 19 is", "18"),
    ("180", "18"),
    ("1.8", "18"),
    ("4", "-4"),
    ("-4", "4"),
    ("10-4", "-4"),  # a subtraction, not a negative number
    ("5 - 4", "-4"),
    ("\\boxed{} 18", "18"),  # the box is the answer and it is empty
    ("\\boxed{x} = 18", "18"),
    ("<answer></answer> 18", "18"),
    ("#### none\n18", "18"),
    ("5/0", "5"),
    ("CO2", "2"),
    ("x18", "18"),
    ("123456789012345678902", "123456789012345678901"),
    ("0.333", "1/3"),
    ("1e999999999", "10"),
    ("9" * 5000, "9"),
    ("1" * 5000 + " is the number", "1"),
]


@pytest.mark.parametrize(("response", "target"), RIGHT)
def test_math_reward_is_one_for_the_right_number(response: str, target: str) -> None:
    assert MathReward()("", response, target) == 1.0


@pytest.mark.parametrize(("response", "target"), WRONG)
def test_math_reward_is_zero_for_anything_else(response: str, target: str) -> None:
    assert MathReward()("", response, target) == 0.0


@pytest.mark.parametrize("value", [*range(-120, 121, 7), 1000, 1234567, -98765])
@pytest.mark.parametrize(
    "form", ["{:d}", "{:,d}", "= {:d}.", "\\boxed{{{:d}}}", "<answer>{:d}</answer>", "#### {:,d}", "{:d}.0"]
)
def test_math_reward_reads_back_what_was_written(value: int, form: str) -> None:
    assert MathReward()("", form.format(value), str(value)) == 1.0
    assert MathReward()("", form.format(value), str(value + 1)) == 0.0


def test_tolerance_is_an_absolute_difference() -> None:
    assert MathReward(tolerance=0.01)("", "3.141", "3.14159") == 1.0
    assert MathReward()("", "3.141", "3.14159") == 0.0
    assert MathReward()("", "0.3333333", "1/3") == 1.0
    assert MathReward()("", "12345678", "12345679") == 0.0  # a relative one would call these equal


@pytest.mark.parametrize("target", ["x^2", "", "3 or 4", "Paris", "#### no number"])
def test_math_reward_refuses_a_target_that_is_no_number(target: str) -> None:
    with pytest.raises(ConfigError, match="needs a target that is a number"):
        MathReward()("", "4", target)


@pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf")])
def test_math_reward_refuses_an_impossible_tolerance(tolerance: float) -> None:
    with pytest.raises(ConfigError, match="tolerance"):
        MathReward(tolerance=tolerance)


@pytest.mark.parametrize(
    "piece", ["\\boxed{", "<answer>", "1,234,", "{", "1/", "- $", "\\frac{", "1 ", "####", "1e9"]
)
def test_a_response_that_repeats_itself_is_graded_quickly(piece: str) -> None:
    began = time.perf_counter()
    MathReward()("", piece * 20_000, "1")
    assert time.perf_counter() - began < 2.0


def test_exact_match_compares_the_whole_text() -> None:
    assert ExactMatchReward()("", " 18\n", "18") == 1.0
    assert ExactMatchReward()("", "18.", "18") == 0.0
    assert ExactMatchReward()("", "The answer is 18", "18") == 0.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>3 and 4 make 7</think>7", 1.0),
        ("\n<think>\nreasons\n</think>\n\n7\n", 1.0),
        ("Sure! <think>reasons</think> 7", 0.5),
        ("<think>reasons</think>  \n", 0.5),
        ("<think> \n </think> 7", 0.0),
        ("<think>reasons, and no end", 0.0),
        ("reasons</think> 7", 0.0),
        ("</think>reasons<think> 7", 0.0),
        ("<think>a</think><think>b</think> 7", 0.0),
        ("7", 0.0),
        ("", 0.0),
    ],
)
def test_thinking_reward_scores_the_form(response: str, score: float) -> None:
    assert ThinkingReward()("", response, "7") == score


def test_thinking_reward_counts_a_tag_that_the_prompt_opened() -> None:
    assert ThinkingReward()("<|assistant|><think>\n", "reasons</think>7", "7") == 1.0


def test_thinking_reward_takes_another_tag() -> None:
    assert ThinkingReward(tag="reason")("", "<reason>so</reason> 7", "7") == 1.0
    assert ThinkingReward(tag="reason")("", "<think>so</think> 7", "7") == 0.0


@pytest.mark.parametrize("reward", [MathReward(0.5), ExactMatchReward(), ThinkingReward("why")])
def test_rewards_travel_between_processes(reward: object) -> None:
    assert pickle.loads(pickle.dumps(reward)) == reward
