"""REINFORCE: the policy gradient itself, importance-weighted and not clipped."""

from dataclasses import dataclass

from torch import Tensor

from forge.rl.loss.ops import AggType, compute_ratio
from forge.rl.loss.policy import PolicyLoss


@dataclass(slots=True, kw_only=True)
class REINFORCELoss(PolicyLoss):
    """REINFORCE (Williams, 1992); with leave-one-out advantages RLOO (arXiv 2402.14740).

    Per token, with r = pi / pi_old and advantage A: -r A, whose gradient is -r A grad log pi: for tokens that
    the policy itself sampled, -A grad log pi. r is for those that a policy some updates older sampled, which
    the papers do not have; it is taken token by token, as in PPO, since a whole sequence's product of ratios
    varies too much to train with.

    An answer is one action, so the terms of its tokens are summed up, and divided by a constant only
    ("fixed_horizon"): a token counts as much in a long answer as in a short one.
    """

    agg_type: AggType = "fixed_horizon"

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -compute_ratio(logprobs, old_logprobs, loss_mask) * advantages, {}
