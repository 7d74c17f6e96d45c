"""AdaptiveAge: how far rollouts may run ahead of the trainer, as far as that keeps it busy and the batches
good (`max_policy_age: auto`)."""

import math
from collections.abc import Mapping

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
    less than a round tells little. What is under way, age + 1 steps' worth, then fills a share 1 - wait of
    the time, so by Little's law (age + 1) / (1 - wait) steps' worth fill all of it. The age goes there, but
    to no more than 2 age + 1 at once, so that it is seen what that does to the batches. It stays at the least
    that keeps the learner busy: what is older than that is older for nothing.

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
        self._num_steps = 0  # of this round so far, and their times:
        self._wait_s = self._time_s = 0.0

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
        else:
            self._num_steps += 1
            self._wait_s += metrics["time/wait_s"]
            self._time_s += metrics["time/step_s"]
            if self._num_steps > self.age:
                self._end_round(is_good=ess >= GOOD_ESS and gap <= GOOD_GAP)
        return self.age

    def state_dict(self) -> dict[str, float]:
        """What `load_state_dict` goes on from; plain numbers."""
        return {
            "age": self.age,
            "is_careful": self._is_careful,
            "unsettled": self._unsettled,
            "num_steps": self._num_steps,
            "wait_s": self._wait_s,
            "time_s": self._time_s,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on from there, within the limit of this one."""
        self.age = min(int(state["age"]), self._limit)
        self._is_careful = bool(state["is_careful"])
        self._unsettled, self._num_steps = int(state["unsettled"]), int(state["num_steps"])
        self._wait_s, self._time_s = state["wait_s"], state["time_s"]

    def _end_round(self, *, is_good: bool) -> None:
        wait, age = min(self._wait_s / self._time_s, 1.0), self.age
        if wait > MAX_WAIT and is_good:
            most = age + 1 if self._is_careful else 2 * age + 1
            age = min(_enough(age, wait), most, self._limit)
        self._change(age)

    def _change(self, age: int) -> None:
        self._unsettled = max(age, self.age) + 1 if age != self.age else 0
        self._num_steps, self._wait_s, self._time_s = 0, 0.0, 0.0
        self.age = age


def _enough(age: int, wait: float) -> int:
    """The age at which a learner that waits for this share of its time would not have to, by Little's law."""
    return 2 * age + 1 if wait == 1.0 else math.ceil((age + 1) / (1.0 - wait)) - 1


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
