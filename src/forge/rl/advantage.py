"""[3] How much better than its group an answer was."""

from collections.abc import Sequence
from statistics import fmean, pstdev


def group_advantages(rewards: Sequence[float], eps: float = 1e-4) -> list[float]:
    """(reward - mean) / (std + eps) within one group (GRPO, arXiv 2402.03300, section 4.1.2; population std).

    A group whose rewards are all equal gets zeros: nothing is to be learned from it.
    """
    mean, std = fmean(rewards), pstdev(rewards)
    return [(reward - mean) / (std + eps) for reward in rewards]
