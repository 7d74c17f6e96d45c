"""GRPO: a clipped policy gradient over groups, with a KL term towards a reference (arXiv 2402.03300)."""

from dataclasses import dataclass

from torch import Tensor

from forge.rl.loss.ops import AggType, clipped_surrogate, compute_ratio
from forge.rl.loss.policy import PolicyLoss
from forge.rl.loss.settings import require_clips


@dataclass(slots=True, kw_only=True)
class GRPOLoss(PolicyLoss):
    """Group relative policy optimisation, eq. 3 of arXiv 2402.03300.

    Per token, with r = pi / pi_old and advantage A: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and
    the KL term of PolicyLoss, eq. 4. The paper has one bound for both sides and averages by "sequence_mean".
    The defaults here are clip_high > clip_low, DAPO's clip-higher (arXiv 2503.14476, eq. 10), and the
    constant divisor "fixed_horizon" of Dr. GRPO (arXiv 2503.20783), which does not favour long wrong answers.
    Dr. GRPO itself is that with beta 0, the same bound for both sides, as in PPO, and advantages that are not
    divided by their group's deviation.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    beta: float = 0.1
    agg_type: AggType = "fixed_horizon"

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        require_clips(self)

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = compute_ratio(logprobs, old_logprobs, loss_mask)
        objective, is_clipped = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        return -objective, {"clip_frac": is_clipped}
