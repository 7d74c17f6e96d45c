"""Every loss beside its oracle. The settings are chosen so that each of a loss's branches is taken often."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from forge.rl.loss import (
    CISPOLoss,
    DAPOLoss,
    GRPOLoss,
    GSPOLoss,
    PPOLoss,
    REINFORCELoss,
    SAPOLoss,
    SFTLoss,
)
from tests.unit.rl.loss import oracle
from tests.unit.rl.loss.batches import Loss

HORIZON = 9


@dataclass(frozen=True, slots=True)
class Case:
    """A loss class with settings, and the oracle's surrogate with the same ones."""

    name: str
    loss_class: Callable[..., Any]
    surrogate: oracle.Surrogate
    settings: dict[str, Any] = field(default_factory=dict)
    mean: str = "token_mean"
    is_policy: bool = True  # has a ratio, a KL term, an entropy bonus and corrections

    def build(self, **settings: Any) -> Loss:
        """The pure surrogate unless `settings` say more."""
        if not self.is_policy:
            return self.loss_class()
        chosen = {"beta": 0.0, "agg_type": self.mean, "horizon": HORIZON} | self.settings | settings
        return self.loss_class(**chosen)


CASES = [
    Case("grpo", GRPOLoss, oracle.ppo(0.2, 0.28), {"clip_low": 0.2, "clip_high": 0.28}, "sequence_mean"),
    Case("dr_grpo", GRPOLoss, oracle.ppo(0.2, 0.2), {"clip_low": 0.2, "clip_high": 0.2}, "fixed_horizon"),
    Case("dapo", DAPOLoss, oracle.ppo(0.2, 0.28), {"clip_low": 0.2, "clip_high": 0.28}),
    Case("cispo", CISPOLoss, oracle.cispo(None, 0.3), {"clip_high": 0.3}),
    Case("gspo", GSPOLoss, oracle.gspo(0.1, 0.15), {"clip_low": 0.1, "clip_high": 0.15}, "sequence_mean"),
    Case(
        "gspo_token",
        GSPOLoss,
        oracle.gspo_token(0.1, 0.15),
        {"level": "token", "clip_low": 0.1, "clip_high": 0.15},
        "sequence_mean",
    ),
    Case("sapo", SAPOLoss, oracle.sapo(1.0, 1.05), {"tau_pos": 1.0, "tau_neg": 1.05}, "sequence_mean"),
    Case("reinforce", REINFORCELoss, oracle.reinforce),
    Case("ppo", PPOLoss, oracle.ppo(0.2, 0.2), {"clip_low": 0.2, "clip_high": 0.2}),
    Case(
        "ppo_dual",
        PPOLoss,
        oracle.ppo(0.2, 0.2, dual=1.3),
        {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.3},
    ),
    Case("sft", SFTLoss, oracle.score, is_policy=False),
]
POLICY_CASES = [case for case in CASES if case.is_policy]

every_loss = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_policy_loss = pytest.mark.parametrize("case", POLICY_CASES, ids=lambda case: case.name)
