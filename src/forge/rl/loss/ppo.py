"""PPO: the clipped policy loss (arXiv 1707.06347)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from forge.rl.loss.ops import AggType, clipped_surrogate, compute_ratio
from forge.rl.loss.policy import PolicyLoss
from forge.rl.loss.settings import require, require_clips


@dataclass(slots=True, kw_only=True)
class PPOLoss(PolicyLoss):
    """Proximal policy optimisation, eq. 7 of arXiv 1707.06347; the critic's loss is not part of it.

    Per token, with r = pi / pi_old and advantage A: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),
    averaged over all tokens of the batch.

    dual_clip c > 1: where A < 0 the objective is max(min(...), c A), a bound on what a token costs that has
    become much more likely (arXiv 1912.09729, which uses 3). None: no such bound.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    agg_type: AggType = "token_mean"

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        require_clips(self)
        require(self, "dual_clip", self.dual_clip is None or self.dual_clip > 1, "be above 1")

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = compute_ratio(logprobs, old_logprobs, loss_mask)
        objective, is_clipped = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            bound = self.dual_clip * advantages
            objective = torch.where(advantages < 0, torch.maximum(objective, bound), objective)
        return -objective, {"clip_frac": is_clipped}
