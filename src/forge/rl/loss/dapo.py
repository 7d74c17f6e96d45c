"""DAPO: decoupled clip bounds and a mean over all tokens (arXiv 2503.14476)."""

from dataclasses import dataclass

from torch import Tensor

from forge.rl.loss.ops import AggType, clipped_surrogate, compute_ratio
from forge.rl.loss.policy import PolicyLoss
from forge.rl.loss.settings import require, require_clips

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
FIRST_BETA = 0.1  # of adaptive_kl


@dataclass(slots=True, kw_only=True)
class DAPOLoss(PolicyLoss):
    """Decoupled clip and dynamic sampling policy optimisation, eq. 8 of arXiv 2503.14476.

    Per token, with r = pi / pi_old and advantage A: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),
    averaged over all tokens of the batch, without a KL term. The paper's other two parts, dynamic sampling
    and the penalty on overlong answers, choose and reward samples; they are no part of the loss.

    clip_range: one bound for both sides. adaptive_kl: adds a KL term that is steered to `kl_target`; its
    weight starts at `beta`, at 0.1 where that is 0.
    """

    clip_low: float = CLIP_LOW
    clip_high: float = CLIP_HIGH
    agg_type: AggType = "token_mean"
    clip_range: float | None = None
    adaptive_kl: bool = False

    def __post_init__(self) -> None:
        if self.clip_range is not None:
            require(self, "clip_range", 0 <= self.clip_range <= 1, "lie in [0, 1]")
            clips = {(CLIP_LOW, CLIP_HIGH), (self.clip_range, self.clip_range)}  # the latter when made again
            alone = (self.clip_low, self.clip_high) in clips
            require(self, "clip_range", alone, "stand alone: leave out clip_low and clip_high, or it")
            self.clip_low = self.clip_high = self.clip_range
        if self.adaptive_kl:
            require(self, "kl_target", self.kl_target is not None, "be set for adaptive_kl, e.g. to 0.01")
            self.beta = self.beta or FIRST_BETA
        PolicyLoss.__post_init__(self)
        require_clips(self)

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = compute_ratio(logprobs, old_logprobs, loss_mask)
        objective, is_clipped = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        return -objective, {"clip_frac": is_clipped}
