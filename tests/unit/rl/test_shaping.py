"""What is taken off rewards, against the papers' equations; recipes against the registry of losses."""

import math

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from forge.data_models import TrainTargets
from forge.errors import ConfigError
from forge.rl.advantage import check_estimate
from forge.rl.kl import next_coefficient
from forge.rl.loss.registry import LOSSES
from forge.rl.recipes import RECIPES, Recipe, recipe_of
from forge.rl.shaping import KLReward, overlong_penalty


def test_the_overlong_penalty_is_eq_13_of_dapo() -> None:
    for max_tokens, cache in ((20, 5), (8, 8), (4, 1)):
        for length in range(max_tokens + 5):
            if length <= max_tokens - cache:
                expected = 0.0
            elif length <= max_tokens:
                expected = ((max_tokens - cache) - length) / cache
            else:
                expected = -1.0
            assert overlong_penalty(length, max_tokens, cache) == pytest.approx(expected)
    for cache in (0, 9):
        with pytest.raises(ConfigError, match=rf"overlong_cache must lie in \[1, 8\].* got {cache}"):
            overlong_penalty(3, 8, cache)


def targets_of(policy: list[list[float]], reference: list[list[float]]) -> TrainTargets:
    """Completions with these log-probabilities, padded."""
    logprobs, ref_logprobs, mask = (
        pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        for rows in (policy, reference, [[True] * len(row) for row in policy])
    )
    none = torch.zeros(mask.shape, dtype=torch.int64)
    return TrainTargets(none, none, mask, torch.zeros(len(policy)), logprobs, ref_logprobs)


def test_the_kl_of_the_whole_sequence_is_taken_off_the_reward() -> None:
    shape = KLReward(beta=0.5)
    policy, reference = [-0.1, -2.0, -0.7], [-0.3, -1.0, -0.7]
    got = shape(2.0, torch.tensor(policy), torch.tensor(reference))
    assert got == pytest.approx(2.0 - 0.5 * math.fsum(p - r for p, r in zip(policy, reference, strict=True)))
    shape.after_step([targets_of([policy], [reference])])
    assert shape.beta == 0.5  # without a target it stays


def test_the_coefficient_follows_the_kl_per_token_of_the_batch() -> None:
    """Of nothing else: what was shaped for another batch, or in vain, as it is done again after a resume,
    does not count."""
    shape = KLReward(beta=0.5, target=0.1)
    # 0.4 nats in 4 tokens, on two ranks: what is wanted
    shape.after_step([targets_of([[0.0] * 3], [[-0.11] * 3]), targets_of([[0.0]], [[-0.07]])])
    assert shape.beta == pytest.approx(0.5)
    shape(0.0, torch.zeros(3), torch.full((3,), -9.0))
    shape.after_step([targets_of([[0.0, 0.0], [0.0]], [[-0.12, -0.12], [-0.075]])])
    assert shape.beta == pytest.approx(next_coefficient(0.5, 0.105, 0.1), rel=1e-6)
    assert shape.beta > 0.5


@pytest.mark.parametrize(
    ("beta", "target", "message"),
    [
        (-1.0, None, "beta must not be negative"),
        (0.1, 0.0, "kl_target must be"),
        (0.0, 0.1, "kl_target must"),
    ],
)
def test_kl_settings_that_can_not_work_are_refused(beta: float, target: float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KLReward(beta, target)


def test_every_loss_of_the_registry_has_a_recipe_and_a_users_own_has_that_of_grpo() -> None:
    assert set(RECIPES) == set(LOSSES) - {"sft"}  # which compares nothing
    for recipe in RECIPES.values():
        check_estimate(recipe.baseline, recipe.normalize)
    assert recipe_of("my_pkg.my_module.MyLoss") == recipe_of("grpo") == Recipe("group_mean", "group_std")
    assert (
        recipe_of("forge.rl.loss.DAPOLoss") == recipe_of("forge.rl.loss.dapo.DAPOLoss") == recipe_of("dapo")
    )
    assert recipe_of("forge.rl.loss.PPOLoss") == recipe_of("ppo")
    assert recipe_of("dapo").dynamic_sampling and recipe_of("dapo").overlong
