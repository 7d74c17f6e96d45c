"""Group advantages against numbers worked out by hand."""

import pytest

from forge.rl.advantage import group_advantages


def test_advantages_are_standard_scores_of_the_group() -> None:
    # mean 0.25, population std sqrt(3)/4
    got = group_advantages([1, 0, 0, 0], eps=0.0)
    assert got == pytest.approx([3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)])
    assert group_advantages([5.0, 7.0], eps=1.0) == pytest.approx([-0.5, 0.5])


def test_a_group_without_variance_teaches_nothing() -> None:
    assert group_advantages([0.3, 0.3, 0.3]) == pytest.approx([0, 0, 0], abs=1e-9)
