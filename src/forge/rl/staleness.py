"""AdaptiveAge: how far rollouts may run ahead of the trainer, as far as that keeps it busy and the batches
good (`max_policy_age: auto`)."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge.errors import ConfigError

MAX_WAIT = 0.01
"""Share of its time that the learner may wait for batches before rollouts are let further ahead."""

GOOD_ESS, BAD_ESS = 0.9, 0.8
"""Rollouts are let further ahead while the effective sample size, as a share of the tokens, is above the
first, and held back once it is below the second: a fifth of the batch counts for nothing then."""

GOOD_GAP, BAD_GAP = 0.05, 0.1
"""The same for the mean |log pi - log pi_generator| of a token, in nats. PPO clips at 0.2."""


class AdaptiveAge:
    """The bound for what is let into the replay buffer (`ReplayBuffer.bound`), at most `limit` versions.

        bound = AdaptiveAge(limit=8)
        await buffer.bound.call_one(bound.age)
        ...  # after each step, with its row of metrics
        await buffer.bound.call_one(bound.after_step(row))

    **Raised**, while batches are good, when the learner had to wait for more than `MAX_WAIT` of a round. A
    round is age + 1 steps: what is let in too late makes one of these wait and leaves the others alone, so
    less than a round tells little. It goes to the least age at which the learner should be busy, as two
    rounds tell, this one and the last at a lower age (`_Round`), but to no more than 2 age + 1 at once, so
    that it is seen what that does to the batches; and it stays where that would win less than `MAX_WAIT`,
    as where the generators are slower than the trainer whatever they are given: what is older than it must
    be is older for nothing.

    **Halved** when batches are bad, as in TCP's congestion avoidance (Chiu and Jain, 1989); after that it is
    raised by one at a time. A batch is as good as its effective sample size, (sum w)^2 / (n sum w^2) of the
    importance weights w (Kish, 1965; that it falls before a run with stale data collapses: arXiv 2602.17616;
    as a measure of lag: arXiv 2509.19128), and as the mismatch of trainer and generator is small.
    Between the good and the bad values nothing changes.

    After each change age + 1 steps pass, so that what was let in before is trained on and what the change
    does can be seen. It begins with rollouts one update of the generators ahead.

    limit: AReaL's decoupled objective reached 42.0 % on AIME24 on-policy, 42.2 with ages up to 4, 41.0 up to
    8, 38.7 up to 16 (arXiv 2505.24298; post v0.3, table 3). sync_interval: steps from one update of the
    generators to the next; the age is never below sync_interval - 1, as no rollout could begin then.
    """

    def __init__(self, limit: int, sync_interval: int = 1) -> None:
        if limit < sync_interval:
            raise ConfigError(
                f"staleness.limit must be at least {sync_interval}, got {limit}: max_policy_age auto begins "
                "with rollouts one update of the generators ahead"
            )
        self.age = age = sync_interval
        self._limit = limit
        self._lowest = sync_interval - 1
        self._is_careful = False  # once batches were bad
        self._unsettled = age + 1  # steps until what the last change did is seen
        self._round = _Round(age)
        self._lower: _Round | None = None  # the last at a lower age, while no batch was bad

    def after_step(self, metrics: Mapping[str, float]) -> int:
        """The bound from now on. metrics: a step's row, with loss/ess, loss/logprob_gap, time/wait_s and
        time/step_s. A step that was skipped, as its loss or gradient was not finite, has neither of the first
        two, and its batch was bad. Raises ConfigError where the loss does not tell them."""
        ess, gap = _of_loss(metrics, "ess"), _of_loss(metrics, "logprob_gap")
        if self._unsettled > 0:
            self._unsettled -= 1
        elif not (ess >= BAD_ESS and gap <= BAD_GAP):  # NaN is bad
            self._is_careful = True
            self._change(max(self.age // 2, self._lowest))
            self._lower = None
        else:
            self._round.add(metrics["time/wait_s"], metrics["time/step_s"])
            if self._round.num_steps > self.age:
                self._end_round(is_good=ess >= GOOD_ESS and gap <= GOOD_GAP)
        return self.age

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` goes on from; plain data."""
        return {
            "age": self.age,
            "is_careful": self._is_careful,
            "unsettled": self._unsettled,
            "round": dataclasses.astuple(self._round),
            "lower": self._lower and dataclasses.astuple(self._lower),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, within the limit of this one."""
        self.age = min(state["age"], self._limit)
        self._is_careful = bool(state["is_careful"])
        self._unsettled = state["unsettled"]
        if self.age == state["age"]:
            self._round = _Round(*state["round"])
            self._lower = state["lower"] and _Round(*state["lower"])
        else:
            self._round, self._lower = _Round(self.age), None

    def _end_round(self, *, is_good: bool) -> None:
        ended, most = self._round, min(self.age + 1 if self._is_careful else 2 * self.age + 1, self._limit)
        age = min(ended.enough(self._lower), most) if ended.wait > MAX_WAIT and is_good else self.age
        if age > self.age and ended.gain(self._lower, age) > MAX_WAIT:
            self._lower = ended
            self._change(age)
        else:
            self._round = _Round(self.age)

    def _change(self, age: int) -> None:
        self._unsettled = max(age, self.age) + 1 if age != self.age else 0
        self._round = _Round(age)
        self.age = age


@dataclass(slots=True)
class _Round:
    """What was waited at one age, and what that says of others.

    With a step of a learner that need not wait as the unit of time, steps take 1 / (1 - wait). Under way are
    age + 1 steps' worth, and a rollout lasts the longer the more there is, as a decoding step does: fixed +
    share * (age + 1). So by Little's law, where the learner waits at all,

        1 / (1 - wait)  =  fixed / (age + 1) + share

    Two rounds tell both; one alone tells `fixed` where `share` is taken for 0. `share` is what generators
    with every place taken need for a step: where it is 1 or more, they are the slower side.
    """

    age: int
    num_steps: int = 0
    wait_s: float = 0.0
    time_s: float = 0.0

    def add(self, wait_s: float, time_s: float) -> None:
        """One step more."""
        self.num_steps += 1
        self.wait_s += wait_s
        self.time_s += time_s

    @property
    def wait(self) -> float:
        """Share of its time that the learner waits; below 1, as a step takes some time."""
        return min(self.wait_s / self.time_s, 0.999)

    def enough(self, lower: "_Round | None") -> int:
        """The least age at which the learner need not wait; a very great one where it always must."""
        fixed, share = self._law(lower)
        return math.ceil(fixed / max(1.0 - share, 1e-6) - 1e-9) - 1

    def gain(self, lower: "_Round | None", age: int) -> float:
        """Share of a step's time that would be won by going to `age`."""
        fixed, _ = self._law(lower)
        return fixed * (1 / (self.age + 1) - 1 / (age + 1)) * (1.0 - self.wait)

    def _law(self, lower: "_Round | None") -> tuple[float, float]:
        """fixed, share"""
        length = 1 / (1.0 - self.wait)
        alone = length * (self.age + 1)
        if lower is None:
            return alone, 0.0
        fixed = (1 / (1.0 - lower.wait) - length) / (1 / (lower.age + 1) - 1 / (self.age + 1))
        fixed = min(max(fixed, 0.0), alone)
        return fixed, length - fixed / (self.age + 1)


def _of_loss(metrics: Mapping[str, float], name: str) -> float:
    value = metrics.get(f"loss/{name}")
    if value is None and "trainer/skipped" in metrics:
        return math.nan
    if value is None:
        raise ConfigError(
            f"max_policy_age auto needs a loss that tells {name}, and this one does not: set max_policy_age "
            "to a number, or use one of forge.rl.loss"
        )
    return value
