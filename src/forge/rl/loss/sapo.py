"""SAPO: a soft gate in place of the clip (arXiv 2511.20347)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from forge.rl.loss.ops import AggType, compute_ratio
from forge.rl.loss.policy import PolicyLoss
from forge.rl.loss.settings import require, require_finite


@dataclass(slots=True, kw_only=True)
class SAPOLoss(PolicyLoss):
    """Soft adaptive policy optimisation (arXiv 2511.20347).

    Per token, with r = pi / pi_old and advantage A: -f(r) A, f(r) = 4 / tau * sigmoid(tau (r - 1)), averaged
    over each sequence's tokens, then over the sequences. tau is tau_pos where A > 0, else tau_neg. The
    gradient of f is that of r at r = 1 and fades on both sides, the faster the larger tau.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    agg_type: AggType = "sequence_mean"

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        require_finite(self, "tau_pos", "tau_neg")
        require(self, "tau_pos", self.tau_pos > 0, "be above 0")
        require(self, "tau_neg", self.tau_neg > 0, "be above 0")

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = compute_ratio(logprobs, old_logprobs, loss_mask)
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg)
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages, {}
