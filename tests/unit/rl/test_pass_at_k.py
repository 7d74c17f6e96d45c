"""pass@k against enumeration and against what it estimates."""

from itertools import combinations
from math import comb

import numpy as np
import pytest

from forge.errors import ForgeError
from forge.rl.pass_at_k import mean_pass_at_k, pass_at_k, powers_of_two


def test_it_is_the_share_of_draws_that_hold_a_right_answer() -> None:
    for n in range(1, 9):
        for right in range(n + 1):
            answers = [True] * right + [False] * (n - right)
            for k in range(1, n + 1):
                draws = np.array([any(draw) for draw in combinations(answers, k)], dtype=np.float64)
                assert pass_at_k(n, right, k) == pytest.approx(draws.mean(), rel=1e-15, abs=0)


def test_it_is_unbiased() -> None:
    """Over all outcomes of n answers that are right with probability p, its mean is that of k answers."""
    for n, p in ((1, 0.3), (7, 0.02), (16, 0.5), (200, 0.9)):
        outcomes = [comb(n, right) * p**right * (1 - p) ** (n - right) for right in range(n + 1)]
        for k in {1, (n + 1) // 2, n}:
            mean = sum(share * pass_at_k(n, right, k) for right, share in enumerate(outcomes))
            assert mean == pytest.approx(1 - (1 - p) ** k, rel=1e-12)


def test_it_is_averaged_over_questions_for_powers_of_two_and_all_answers() -> None:
    assert [powers_of_two(n) for n in (1, 2, 3, 8, 12)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 12],
    ]
    got = mean_pass_at_k([0, 1, 3], 3)
    assert got == pytest.approx({1: (0 + 1 / 3 + 1) / 3, 2: (0 + 2 / 3 + 1) / 3, 3: 2 / 3})


@pytest.mark.parametrize(("answers", "right", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_more_draws_than_answers_are_refused(answers: int, right: int, k: int) -> None:
    with pytest.raises(ForgeError, match="it needs 1 <= k <= answers"):
        pass_at_k(answers, right, k)
