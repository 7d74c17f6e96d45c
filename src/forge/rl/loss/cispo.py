"""CISPO: clips the importance weight and keeps every token's gradient (MiniMax-M1, arXiv 2506.13585)."""

from dataclasses import dataclass

from torch import Tensor

from forge.rl.loss.ops import AggType, compute_ratio
from forge.rl.loss.policy import PolicyLoss
from forge.rl.loss.settings import require, require_clips


@dataclass(slots=True, kw_only=True)
class CISPOLoss(PolicyLoss):
    """Clipped importance-sampling policy optimisation, eq. 4 and 5 of arXiv 2506.13585.

    Per token, with r = pi / pi_old and advantage A: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi, where
    no gradient flows through sg(.), averaged over all tokens of the batch.

    The paper bounds the weight only from above, which is clip_low None, and does not tell by what. The
    default lets weights up to 5 through, as ScaleRL does (arXiv 2510.13786).
    """

    clip_low: float | None = None
    clip_high: float = 4.0
    agg_type: AggType = "token_mean"

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        if self.clip_low is None:
            require(self, "clip_high", self.clip_high >= 0, "not be negative")
        else:
            require_clips(self)

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = compute_ratio(logprobs.detach(), old_logprobs, loss_mask)
        weight = ratio.clamp(0.0 if self.clip_low is None else 1 - self.clip_low, 1 + self.clip_high)
        return -weight * advantages * logprobs, {"clip_frac": weight != ratio}
