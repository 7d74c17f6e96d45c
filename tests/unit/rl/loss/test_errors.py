"""What the losses and their terms refuse, and in which words."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from forge.errors import ConfigError
from forge.rl.loss import (
    CISPOLoss,
    DAPOLoss,
    GRPOLoss,
    GSPOLoss,
    OffPolicyCorrection,
    PPOLoss,
    REINFORCELoss,
    SAPOLoss,
)
from forge.rl.loss.ops import aggregate
from tests.unit.rl.loss.batches import NAN, evaluate, make_batch

CLIPPED = (GRPOLoss, DAPOLoss, CISPOLoss, GSPOLoss, PPOLoss)


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        *((loss, {"clip_low": 1.5}, r"^clip_low must lie in \[0, 1\], got 1.5$") for loss in CLIPPED),
        *((loss, {"clip_high": -0.1}, "^clip_high must not be negative, got -0.1$") for loss in CLIPPED),
        (GRPOLoss, {"clip_low": NAN}, "^clip_low must .* got nan$"),
        (CISPOLoss, {"clip_low": 0.1, "clip_high": -0.1}, "^clip_high must not be negative, got -0.1$"),
        *(
            (loss, {"clip_low": None}, r"^clip_low must lie in \[0, 1\], got None$")
            for loss in CLIPPED
            if loss is not CISPOLoss
        ),
        *(
            (SAPOLoss, {"beta": 0.1, name: value}, f"^{name} must be finite, got {value}$")
            for name in ("beta", "kl_target", "entropy_coef", "tau_pos", "tau_neg")
            for value in (math.inf, NAN)
        ),
        (REINFORCELoss, {"beta": -1.0}, "^beta must not be negative, got -1.0$"),
        (REINFORCELoss, {"horizon": 0}, "^horizon must be at least 1, got 0$"),
        (REINFORCELoss, {"kl_kind": "k4"}, "^kl_kind must be one of k1, k2, k3, got 'k4'$"),
        (REINFORCELoss, {"agg_type": "mean"}, "^agg_type must be one of fixed_horizon, .* got 'mean'$"),
        (REINFORCELoss, {"kl_target": 0.0, "beta": 0.1}, "^kl_target must be above 0, got 0.0$"),
        (REINFORCELoss, {"kl_target": 0.01}, "^beta must start above 0 to follow kl_target, .* got 0.0$"),
        (DAPOLoss, {"adaptive_kl": True}, "^kl_target must be set for adaptive_kl, .* got None$"),
        (DAPOLoss, {"clip_range": 2.0}, r"^clip_range must lie in \[0, 1\], got 2.0$"),
        (GSPOLoss, {"level": "word"}, "^level must be one of sequence, token, got 'word'$"),
        (SAPOLoss, {"tau_neg": 0.0}, "^tau_neg must be above 0, got 0.0$"),
        (PPOLoss, {"dual_clip": 1.0}, "^dual_clip must be above 1, got 1.0$"),
    ],
)
def test_settings_that_make_no_sense(loss: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loss(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "mask", "cap": 3.0}, "^cap must be left out, or at 2.0: mask has low and high, got 3.0$"),
        ({"kind": "truncate", "high": 3.0}, "^high must be left out, or at 5.0: truncate has cap, got 3.0$"),
        ({"kind": "decoupled", "low": 0.1}, "^low must be left out, .*: decoupled has no bounds, got 0.1$"),
    ],
)
def test_bounds_of_another_correction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffPolicyCorrection(**settings)


def test_a_kl_term_without_a_reference() -> None:
    batch = replace(make_batch([[True]], seed=0), ref_logprobs=None)
    with pytest.raises(ConfigError, match=r"^beta is 0.1, but there are no reference"):
        evaluate(GRPOLoss(), batch)
    assert "kl" not in evaluate(GRPOLoss(beta=0.0), batch)[2]


def test_a_mean_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="agg_type must be one of fixed_horizon, token_mean, sequence_mean"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), "mean")  # pyright: ignore[reportArgumentType]
