"""[4] Slack: what a batch may take so that everything promised can still be trained on in time.

A rollout that was let in is a promise: its episodes are trained on before they are too old. They are **due**
at the version of their policy plus the greatest age; those of a rollout under way at the version that
generated when it began plus that age, or later, as what it brings is not older. With P episodes a step, all
promises can be kept from version v on exactly if for every version d >= v

    promised episodes due by d, waiting or under way  <=  P * (d - v + 1)                                  (1)

(the most urgent first then keeps all of them: Jackson 1955, Liu and Layland 1973). (1) holds at all times:

- *Letting a rollout in* adds n episodes that are due at g + a or later, where version g generates and a is
  the greatest age. It happens only while all promised episodes and these n are at most P * (g + a + 1 - v)
  (`admission`; a lower bound on the age lets in less). So (1) holds for d >= g + a; below nothing changes.
- *A step* at v takes P episodes, and (1) has to hold from v + 1 on: of those due by d it must take the
  need(d) = (promised and due by d) - P * (d - v) or more. As need(d) <= P by (1), a batch has room for them.
  What remains of it for others, P - need(d), is the slack at d: an episode that is not due by d costs one of
  it. The strategy decides who gets the slack: any order of preference is followed as far as it goes, and
  exactly so far. Where what waits is less than need(d), the step waits for rollouts under way.
- *A restart*, or an episode of a newer policy than was expected, moves what is due to later: (1) still holds.
- The *trainer's next version* is what a step leaves behind; a *newer generator* changes nothing in (1).

Episodes that came without a rollout let in, and those that are handed out again, were promised nothing: they
get slack only. So (1) does not depend on how many of them there are, and it costs nothing that an episode is
left out of a second batch of the same version. What breaks (1) comes from outside: versions that the trainer
skips, and batches smaller than a step's. Then as much as possible is taken in time, and the rest is dropped
when it is too old.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate


class Slack:
    """That of one batch of `num_wanted` episodes at `version`, at each version at which something is due.

    waiting, running: promised episodes, by the version at which they are due.
    """

    def __init__(
        self,
        waiting: Mapping[int, int],
        running: Mapping[int, int],
        version: int,
        num_wanted: int,
        per_step: int,
    ) -> None:
        running = {due: num for due, num in running.items() if due >= version}  # else nothing can be done
        promised = Counter(waiting) + Counter(running)
        self._due = sorted(promised)
        total = accumulate(promised[due] for due in self._due)
        needs = [num - per_step * (due - version) for due, num in zip(self._due, total, strict=True)]
        first_running = min(running, default=None)
        self.num_left = num_wanted
        self.must_wait = any(  # more is needed than fits, but some of it is still under way
            need > num_wanted and first_running is not None and first_running <= due
            for due, need in zip(self._due, needs, strict=True)
        )
        self._spare = [max(0, num_wanted - max(0, need)) for need in needs]

    def can_fill(self, waiting: Mapping[int, int], num_others: int) -> bool:
        """Whether the batch can be filled from so many promised episodes, by when they are due, and others.

        Those that are due last are held back most; so what fits is found from the end.
        """
        if self.must_wait:
            return False
        num = num_others
        for due, spare in zip(reversed(self._due), reversed(self._spare), strict=True):
            num = min(num, spare) + waiting.get(due, 0)
        return num >= self.num_left

    def fits(self, due: int | None) -> int:
        """How many episodes that are due then may still be taken; None: to which nothing was promised."""
        before = len(self._due) if due is None else bisect_left(self._due, due)
        return min(self._spare[:before], default=self.num_left) if before else self.num_left

    def take(self, num: int, due: int | None) -> None:
        """So many are in the batch."""
        before = len(self._due) if due is None else bisect_left(self._due, due)
        self.num_left -= num
        for i in range(before):
            self._spare[i] -= num
