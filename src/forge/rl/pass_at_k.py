"""[3] pass@k: how likely one of k answers is right."""

from collections.abc import Sequence
from math import comb
from statistics import fmean

from forge.errors import ForgeError


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """The probability that k of these answers, drawn without putting back, hold a right one.

    1 - C(n - c, k) / C(n, k): unbiased for "k new answers hold a right one", which 1 - (1 - c/n)^k is not
    (Chen et al. 2021, arXiv 2107.03374, eq. 1). ForgeError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= num_answers and 0 <= num_right <= num_answers):
        raise ForgeError(
            f"pass@{k} of {num_right} right answers in {num_answers}: it needs 1 <= k <= answers, and "
            "0 <= right <= answers"
        )
    draws = comb(num_answers, k)
    return (draws - comb(num_answers - num_right, k)) / draws  # of integers: rounded once


def mean_pass_at_k(num_right: Sequence[int], num_answers: int) -> dict[int, float]:
    """pass@k averaged over questions with that many right answers each, for each k of `powers_of_two`."""
    return {
        k: fmean(pass_at_k(num_answers, right, k) for right in num_right) for k in powers_of_two(num_answers)
    }


def powers_of_two(end: int) -> list[int]:
    """1, 2, 4, ... below `end`, and `end`."""
    return [*(2**i for i in range((end - 1).bit_length())), end]
