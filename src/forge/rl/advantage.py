"""[3] How much better an answer was than others: than those of its group, then than those of its batch."""

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Literal

import torch
from torch import Tensor

from forge.errors import ConfigError, ForgeError

Baseline = Literal["group_mean", "leave_one_out", "none"]
Normalize = Literal["group_std", "batch_std", "none"]

EPS = 1e-4
"""Added to a standard deviation that is divided by."""


def group_advantages(rewards: Sequence[float], eps: float = EPS) -> list[float]:
    """(reward - mean) / (std + eps) within one group (GRPO, arXiv 2402.03300, section 4.1.2; population std).

    A group whose rewards are all equal gets zeros: nothing is to be learned from it.
    """
    return estimate(rewards, eps=eps)


def estimate(
    rewards: Sequence[float],
    baseline: Baseline = "group_mean",
    normalize: Normalize = "group_std",
    eps: float = EPS,
) -> list[float]:
    """Rewards of one group -> advantages, in the same order.

    baseline, taken from each reward: "group_mean" (GRPO, arXiv 2402.03300), "leave_one_out", the mean of the
    others (RLOO, arXiv 2402.14740), or "none". normalize, what is then divided by: "group_std"
    (population std + eps), or nothing, which is right for "none" (Dr. GRPO, arXiv 2503.20783) and for
    "batch_std": the batch is whitened as a whole later (`whiten`). Equal rewards get zeros where there is a
    baseline. ConfigError for a combination that can't be; ForgeError for a group of one that has
    nobody to be compared with, and for rewards that are not finite.
    """
    check_estimate(baseline, normalize)
    _check_finite(rewards)
    if baseline == "leave_one_out" and len(rewards) < 2:
        raise ForgeError(f"baseline leave_one_out needs groups of 2 completions or more, got {len(rewards)}")
    if baseline == "none":
        return [float(reward) for reward in rewards]
    if not has_variance(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    # reward - mean of the others, of whom there is one less, is this many times reward - mean
    factor = len(rewards) / (len(rewards) - 1) if baseline == "leave_one_out" else 1.0
    scale = pstdev(rewards) + eps if normalize == "group_std" else 1.0
    return [factor * (reward - mean) / scale for reward in rewards]


def check_estimate(baseline: Baseline, normalize: Normalize) -> None:
    """ConfigError for a combination that can't be; the message begins with the setting's name."""
    if baseline == "none" and normalize == "group_std":
        raise ConfigError(
            "normalize group_std needs a baseline: rewards that are all equal would be divided by nothing; "
            "set baseline to group_mean or leave_one_out, or normalize to batch_std or none"
        )


def has_variance(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ, so that something can be learned from it.

    For dynamic sampling these are the rewards as they were given, before any shaping: DAPO (arXiv
    2503.14476, eq. 11) asks whether some of the answers are right and some are wrong. ForgeError for rewards
    that are not finite.
    """
    _check_finite(rewards)
    return max(rewards) != min(rewards)


def whiten(advantages: Sequence[float | Tensor], eps: float = EPS) -> list[float | Tensor]:
    """Advantages of a whole batch, over all ranks, less their mean, divided by their std + eps (REINFORCE++,
    arXiv 2501.03262; population std).

    A number counts once, a tensor [T] once for each of its tokens, so that those of a batch are best either
    all numbers or all tensors. Advantages that are all equal get zeros.
    """
    every = torch.cat([torch.as_tensor(a, dtype=torch.float64).reshape(-1) for a in advantages])
    std, mean = (value.item() for value in torch.std_mean(every, correction=0))
    if every.max() == every.min():
        return [a * 0.0 for a in advantages]  # exactly: of their differences, rounding alone would be left
    return [((a.double() if isinstance(a, Tensor) else a) - mean) / (std + eps) for a in advantages]


def distillation_advantages(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """log pi_teacher - log pi_generator of each token of a completion the generator sampled, [T] -> [T].

    A one-sample estimate of the negative reverse KL towards the teacher per token: trained on as advantages,
    it draws the policy towards the teacher where the policy itself goes (GKD, arXiv 2306.13649).
    """
    return teacher_logprobs.float() - logprobs.float()


def _check_finite(rewards: Sequence[float]) -> None:
    """ForgeError: NaN compares as it happens to stand, and of infinity there is no mean to be better than."""
    if not all(map(math.isfinite, rewards)):
        raise ForgeError(
            f"rewards must be finite, and those of one group are {list(rewards)}; "
            "give 0.0, say, to an answer that can't be graded"
        )
