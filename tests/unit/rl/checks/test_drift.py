"""RewardDrift: the rank-sum test against its definition; a policy that learns, rewards that break."""

import math
import random
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean, pstdev

import pytest

from forge.rl.checks.drift import WINDOW, RewardDrift, change_point, rank_sum_deviations


def answers(rng: random.Random, mean: float) -> list[float]:
    """Eight, of questions that are hard and easy."""
    share = rng.betavariate(1.5 * mean, 1.5 * (1 - mean))
    return [float(rng.random() < share) for _ in range(8)]


def fired(rewards: list[list[float]], per_step: int) -> list[tuple[int, str]]:
    """The groups with which the check fires, and the episodes it names."""
    drift = RewardDrift()
    found = [(i, drift.see(f"{i}/0", r, i // per_step)) for i, r in enumerate(rewards)]
    return [(i, finding.episode_ids[0]) for i, finding in found if finding is not None]


@pytest.mark.parametrize("values", [[0, 0, 0, 1, 1, 2, 3, 5], [0, 0, 0, 0, 0, 0, 0, 1], range(8)])
def test_deviations_are_those_of_the_permutation_test(values: Sequence[float]) -> None:
    """All ways to call four of eight values the later ones, by the definition: wins, and ties by half."""

    def wins(after: tuple[int, ...]) -> float:
        pairs = ((values[a], values[b]) for a in after for b in set(range(8)) - set(after))
        return sum((a > b) + (a == b) / 2 for a, b in pairs)

    by_chance = [wins(after) for after in combinations(range(8), 4)]
    for after in [(4, 5, 6, 7), (0, 2, 4, 7)]:
        before = [values[b] for b in range(8) if b not in after]
        expected = (wins(after) - fmean(by_chance)) / pstdev(by_chance)
        assert rank_sum_deviations(before, [values[a] for a in after]) == pytest.approx(expected)


def test_equal_values_deviate_by_nothing() -> None:
    assert rank_sum_deviations([1.0] * 9, [1.0] * 9) == 0.0


def test_the_change_is_found_where_it_is() -> None:
    rng = random.Random(0)
    values = [rng.random() for _ in range(90)] + [rng.random() - 0.6 for _ in range(38)]
    assert abs(change_point(values) - 90) <= 3
    assert change_point([1.0] * 20 + [0.0] * 5) == 20


@pytest.mark.parametrize("per_step", [8, 32])
@pytest.mark.parametrize("num_steps", [15, 40])  # in which the policy learns nearly all
def test_a_policy_that_learns_is_no_alarm(num_steps: int, per_step: int) -> None:
    for seed in range(2):
        rng = random.Random(seed)
        means = [0.03 + 0.94 / (1 + math.exp(-6 * (s / num_steps - 1))) for s in range(2 * num_steps)]
        assert fired([answers(rng, mean) for mean in means for _ in range(per_step)], per_step) == []


@pytest.mark.parametrize(
    "broken",
    [
        lambda rewards: [0.0] * 8,  # a grader that is down
        lambda rewards: [r - 1 for r in rewards],
        lambda rewards: [r / 3 for r in rewards],
        lambda rewards: [10 + r for r in rewards],
    ],
)
def test_rewards_that_break_are_told_once_naming_the_group_it_began_with(broken) -> None:
    rng = random.Random(1)
    rewards = [answers(rng, 0.5) for _ in range(600)]
    [(at, name)] = fired([*rewards[:300], *map(broken, rewards[300:])], per_step=32)
    assert 300 <= at < 300 + WINDOW
    assert abs(int(name.split("/")[0]) - 300) <= 10


def test_one_outlier_and_a_reward_that_is_not_finite_change_nothing() -> None:
    rng = random.Random(2)
    rewards = [answers(rng, 0.5) for _ in range(300)]
    rewards[200] = [-1e9] * 8
    rewards[210] = [math.nan] * 8
    assert fired(rewards, per_step=8) == []
