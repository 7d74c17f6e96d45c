"""GSPO: ratios and clipping of whole sequences (arXiv 2507.18071)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forge.rl.loss.ops import AggType, clipped_surrogate, compute_ratio
from forge.rl.loss.policy import PolicyLoss
from forge.rl.loss.settings import require_clips


@dataclass(slots=True, kw_only=True)
class GSPOLoss(PolicyLoss):
    """Group sequence policy optimisation, eq. 5 of arXiv 2507.18071, or GSPO-token, eq. 13.

    Per sequence y, with its ratio s = (pi(y) / pi_old(y))^(1 / |y|), eq. 7, and advantage A:
    -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), averaged over the sequences.

    level "token": each token's ratio has the value of s and the gradient of its own log-probability,
    sg(s) pi_t / sg(pi_t), eq. 14. Value and gradient are those of "sequence" when all tokens of a sequence
    have one advantage; where each has its own, only this level gives each token its own gradient.

    The paper's bounds (sec. 5.1) are as small as s is close to 1.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    level: Literal["sequence", "token"] = "sequence"
    agg_type: AggType = "sequence_mean"

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        require_clips(self)

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = self.ratio(logprobs, old_logprobs, loss_mask)
        if self.level == "token":
            ratio = ratio.detach() * torch.exp(logprobs - logprobs.detach())
        objective, is_clipped = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        return -objective, {"clip_frac": is_clipped}

    def ratio(self, logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
        """That of its sequence for every token: s, eq. 7."""
        return compute_ratio(logprobs, old_logprobs, loss_mask, "sequence").expand_as(logprobs)
