"""RewardDrift: rewards that jump, as they do when a reward function breaks and not while a policy learns."""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from forge.rl.checks.finding import Finding

WINDOW = 64
"""Groups; the last so many are compared with as many before them."""

MAX_DEVIATIONS = 5.5
"""Of the rank sum from what it is without a jump; 4e-8 is the chance of more where nothing has changed."""

MAX_LEARNT = 0.1
"""Of the range of rewards, that a policy is taken to learn in one version at most: from nothing to all in ten
steps. So fast a rise is no jump. A fall is never learnt."""


class RewardDrift:
    """The rank-sum test (Mann and Whitney, 1947) between the mean rewards of the last 64 groups and those of
    the 64 before. Ranks make it one test for rewards of any scale, and deaf to single outliers.

    A rise must be more than a policy can have learnt in the versions between (MAX_LEARNT). How rare false
    alarms are, and how soon a broken reward is told: scripts/bench/checks.py, docs/checks.md.
    """

    def __init__(self) -> None:
        # of each group: a name, its mean reward, smallest and largest, the policy version that sampled it
        self._groups: deque[tuple[str, float, float, float, int]] = deque(maxlen=2 * WINDOW)

    def see(self, name: str, rewards: Sequence[float], version: int) -> Finding | None:
        """name: of the group's first episode. Tells once a jump; then both windows are filled anew."""
        if not all(map(math.isfinite, rewards)):
            return None
        self._groups.append((name, fmean(rewards), min(rewards), max(rewards), version))
        if len(self._groups) < 2 * WINDOW:
            return None
        means = [mean for _, mean, *_ in self._groups]
        before, after = means[:WINDOW], means[WINDOW:]
        deviations = rank_sum_deviations(before, after)
        if deviations > MAX_DEVIATIONS:
            learnt = self._learnt()
            deviations = max(0.0, rank_sum_deviations(before, [mean - learnt for mean in after]))
        return self._finding(means, deviations) if abs(deviations) > MAX_DEVIATIONS else None

    def _learnt(self) -> float:
        """How much the policy may have learnt from one window to the other."""
        versions = [version for *_, version in self._groups]
        spread = max(largest for *_, largest, _ in self._groups) - min(
            low for _, _, low, _, _ in self._groups
        )
        return MAX_LEARNT * spread * max(0.0, fmean(versions[WINDOW:]) - fmean(versions[:WINDOW]))

    def _finding(self, means: list[float], deviations: float) -> Finding:
        at = change_point(means)
        name = self._groups[at][0]
        old, new = fmean(means[:at]), fmean(means[at:])
        self._groups.clear()
        return Finding(
            "reward_drift",
            (name,),
            "the mean reward moves as a policy learns",
            f"it jumped from {old:.3g} to {new:.3g} with the group of episode {name} "
            f"({deviations:+.1f} standard deviations of the rank sum of {WINDOW} groups and {WINDOW} before)",
            "see whether the reward function, its service or the data changed there",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"groups": list(self._groups)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._groups = deque(map(tuple, state["groups"]), maxlen=2 * WINDOW)


def rank_sum_deviations(before: Sequence[float], after: Sequence[float]) -> float:
    """How many standard deviations the rank sum of `after` lies above what it is for two samples of one
    distribution, ties counted half; 0 where all values are equal."""
    m, n = len(before), len(after)
    ordered = sorted(before)
    wins = sum(bisect_left(ordered, x) + bisect_right(ordered, x) for x in after) / 2
    ties = sum(k**3 - k for k in Counter([*before, *after]).values())
    variance = m * n / 12 * (m + n + 1 - ties / ((m + n) * (m + n - 1)))
    return (wins - m * n / 2) / math.sqrt(variance) if variance > 0 else 0.0


def change_point(values: Sequence[float]) -> int:
    """Where the mean changes most, an index >= 1: the sum is farthest there from its share of the total."""
    total, size = sum(values), len(values)
    sums = list(accumulate(values))
    return max(range(1, size), key=lambda k: abs(sums[k - 1] - total * k / size))
