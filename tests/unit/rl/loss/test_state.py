"""What a policy loss keeps from step to step, and what it tells of a batch."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from forge.rl.loss import DAPOLoss, GSPOLoss, OffPolicyCorrection, PPOLoss, REINFORCELoss
from tests.unit.rl.loss.batches import evaluate, make_batch

BATCH = make_batch([[True, True, False], [True, True, True]], seed=0)


def test_a_beta_that_is_a_setting_is_no_state_and_one_that_follows_a_target_is() -> None:
    fixed, adaptive = PPOLoss(beta=0.1), PPOLoss(beta=0.1, kl_target=0.01)
    for loss in (fixed, adaptive):
        loss.after_step({"kl": 1.0})
    assert (fixed.beta, fixed.state_dict()) == (0.1, {})
    assert adaptive.state_dict() == {"beta": pytest.approx(0.102)}
    changed = PPOLoss(beta=0.3)  # in the settings of a run that is resumed
    changed.load_state_dict(adaptive.state_dict())
    assert changed.beta == 0.3
    now_adaptive = PPOLoss(beta=0.3, kl_target=0.01)
    now_adaptive.load_state_dict(fixed.state_dict())
    assert now_adaptive.beta == 0.3
    assert float(evaluate(adaptive, BATCH)[2]["beta"]) == pytest.approx(0.102)
    assert "beta" not in evaluate(fixed, BATCH)[2]


def test_an_adaptive_coefficient_starts_where_it_is_set_or_else_at_a_tenth() -> None:
    assert DAPOLoss(adaptive_kl=True, kl_target=0.01).beta == 0.1
    assert DAPOLoss(adaptive_kl=True, kl_target=0.01, beta=0.5).beta == 0.5


def test_the_largest_ratio_is_one_of_a_token_that_counts() -> None:
    own = BATCH.logits.log_softmax(-1).gather(-1, BATCH.target_ids[..., None])[..., 0]
    doubled = replace(BATCH, generator_logprobs=own + torch.tensor(2.0).log())
    assert float(evaluate(REINFORCELoss(), doubled)[2]["ratio_max"]) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_the_ratios_that_are_told_are_those_that_the_loss_takes(level: Any) -> None:
    loss = GSPOLoss(level=level)
    own = BATCH.logits.log_softmax(-1).gather(-1, BATCH.target_ids[..., None])[..., 0]
    gaps = [(o - g)[m] for o, g, m in zip(own, BATCH.generator_logprobs, BATCH.loss_mask, strict=True)]
    ratios = [math.exp(gap.double().mean()) for gap in gaps]  # arXiv 2507.18071, eq. 7
    metrics = evaluate(loss, BATCH)[2]
    assert float(metrics["ratio_mean"]) == pytest.approx((2 * ratios[0] + 3 * ratios[1]) / 5, rel=1e-5)
    assert float(metrics["ratio_max"]) == pytest.approx(max(ratios), rel=1e-5)
    told, _ = loss.terms(own, BATCH.advantages, BATCH.generator_logprobs, BATCH.loss_mask)
    want = [[ratios[0]] * 2 + [0.0], [ratios[1]] * 3]
    assert told.tolist() == [pytest.approx(row, rel=1e-5) for row in want]


def test_the_weights_of_a_correction_have_no_gradient() -> None:
    live, generator = torch.zeros(1, 2, requires_grad=True), torch.ones(1, 2)
    weights, facts = OffPolicyCorrection("decoupled").weights(live, generator, BATCH.loss_mask[:1, :2])
    assert weights.tolist() == [pytest.approx([1 / math.e] * 2)]
    assert not any(value.requires_grad for value in (weights, *facts.values()))
