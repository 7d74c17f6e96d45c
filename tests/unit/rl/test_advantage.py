"""Advantages against loops written from the papers, and numbers worked out by hand."""

import math
import random

import pytest
import torch
from torch import Tensor

from forge.errors import ConfigError, ForgeError
from forge.rl.advantage import (
    Baseline,
    Normalize,
    distillation_advantages,
    estimate,
    group_advantages,
    has_variance,
    whiten,
)
from forge.rl.kl import next_coefficient


def brute_estimate(rewards: list[float], baseline: str, normalize: str, eps: float) -> list[float]:
    n = len(rewards)
    found = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i]
        subtracted = {"group_mean": sum(rewards) / n, "leave_one_out": sum(others) / (n - 1), "none": 0.0}
        variance = sum((r - sum(rewards) / n) ** 2 for r in rewards) / n
        scale = math.sqrt(variance) + eps if normalize == "group_std" else 1.0
        found.append((reward - subtracted[baseline]) / scale)
    return found


def brute_whiten(advantages: list[list[float]], eps: float) -> list[list[float]]:
    every = [a for tokens in advantages for a in tokens]
    mean = sum(every) / len(every)
    std = math.sqrt(sum((a - mean) ** 2 for a in every) / len(every))
    return [[(a - mean) / (std + eps) for a in tokens] for tokens in advantages]


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "none"])
@pytest.mark.parametrize("normalize", ["group_std", "batch_std", "none"])
def test_estimates_are_those_of_the_papers(baseline: Baseline, normalize: Normalize) -> None:
    if (baseline, normalize) == ("none", "group_std"):
        with pytest.raises(ConfigError, match="normalize group_std needs a baseline"):
            estimate([1.0, 0.0], baseline, normalize)
        return
    chance = random.Random(1)
    for size in range(2, 10):
        rewards = [chance.choice([0.0, 1.0, chance.gauss(3, 10)]) for _ in range(size)]
        for eps in (1e-4, 1.0):
            expected = brute_estimate(rewards, baseline, normalize, eps)
            assert estimate(rewards, baseline, normalize, eps) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_advantages_of_a_group_by_hand() -> None:
    # mean 0.25, population std sqrt(3)/4; the mean of the others is 0 for the first, 1/3 for the rest
    assert group_advantages([1, 0, 0, 0], eps=0.0) == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])
    assert group_advantages([5.0, 7.0], eps=1.0) == pytest.approx([-0.5, 0.5])
    assert estimate([1, 0, 0, 0], "leave_one_out", "none") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    with pytest.raises(ForgeError, match="groups of 2 completions or more, got 1"):
        estimate([1.0], "leave_one_out", "none")


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_a_group_without_variance_teaches_exactly_nothing(baseline: Baseline) -> None:
    assert estimate([0.1] * 3, baseline, "group_std") == [0.0] * 3  # the mean in floats is not 0.1
    assert not has_variance([0.1] * 3) and has_variance([0.1, 0.1, 0.2])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_rewards_that_are_not_finite_are_refused_wherever_they_stand(value: float, place: int) -> None:
    rewards = [1.0, 0.0]
    rewards[place] = value
    for baseline in ("group_mean", "leave_one_out", "none"):
        with pytest.raises(ForgeError, match="rewards must be finite"):
            estimate(rewards, baseline, "none")
    with pytest.raises(ForgeError, match="rewards must be finite"):
        has_variance(rewards)


def test_numbers_are_whitened_over_the_batch() -> None:
    chance = random.Random(2)
    for size in range(1, 9):
        advantages = [chance.gauss(-3, 5) for _ in range(size)]
        expected = [a for [a] in brute_whiten([[a] for a in advantages], eps=0.01)]
        assert whiten(advantages, eps=0.01) == pytest.approx(expected)


def test_tensors_are_whitened_token_by_token() -> None:
    chance = random.Random(3)
    for size in range(1, 9):
        advantages = [[chance.gauss(1, 2) for _ in range(chance.randint(1, 20))] for _ in range(size)]
        white = whiten([torch.tensor(tokens, dtype=torch.float64) for tokens in advantages], eps=0.01)
        for got, expected in zip(white, brute_whiten(advantages, eps=0.01), strict=True):
            assert isinstance(got, Tensor) and got.tolist() == pytest.approx(expected)


def test_advantages_that_are_all_equal_are_whitened_to_nothing() -> None:
    assert whiten([0.1] * 7, eps=0.0) == [0.0] * 7  # not rounding errors divided by rounding errors, nor NaN
    for white in whiten([torch.full((n,), 0.1) for n in (1, 3)], eps=0.0):
        assert isinstance(white, Tensor) and white.tolist() == [0.0] * len(white)


def test_a_students_advantage_is_in_the_mean_the_negative_reverse_kl() -> None:
    student, teacher = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    advantages = distillation_advantages(student.log(), teacher.log())
    kl = sum(p * math.log(p / q) for p, q in zip(student.tolist(), teacher.tolist(), strict=True))
    assert float((student * advantages).sum()) == pytest.approx(-kl, rel=1e-6)


def test_a_coefficient_follows_its_kl_by_two_percent_a_step_at_most() -> None:
    assert next_coefficient(0.5, kl=0.1, target=0.1) == 0.5
    assert next_coefficient(0.5, kl=0.11, target=0.1) == pytest.approx(0.5 * 1.01)
    assert next_coefficient(0.5, kl=9.0, target=0.1) == pytest.approx(0.5 * 1.02)
    assert next_coefficient(0.5, kl=-9.0, target=0.1) == pytest.approx(0.5 * 0.98)
