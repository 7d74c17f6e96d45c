"""[4] ReplayBuffer: episodes wait here for the trainer, and rollouts for the trainer to catch up."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, ClassVar

from forge.actors.buffer.compact import compact
from forge.actors.buffer.counts import BufferInfo
from forge.actors.buffer.events import (
    Added,
    Admitted,
    Advanced,
    Bounded,
    Event,
    Generating,
    Loaded,
    Restarted,
    Sampled,
)
from forge.actors.buffer.history import Batch
from forge.actors.buffer.queue import EpisodeQueue
from forge.actors.buffer.terms import Strategy, Terms
from forge.actors.buffer.turns import Turns
from forge.controller import ForgeActor, call_id, endpoint
from forge.controller.journal import Journal
from forge.data_models import Episode
from forge.errors import ConfigError, ForgeError
from forge.observability.metrics import record
from forge.rl.advantage import whiten
from forge.rl.arrange import TrainBatch, arrange, arrange_minibatches, check_minibatches
from forge.rl.collate import advantages_of

logger = logging.getLogger(__name__)

MAX_FUTILE = 1000
"""Rollouts that begin again one after the other, none of all bringing anything, before that is an error."""


class ReplayBuffer(ForgeActor):
    """Lets rollouts in as far as what they bring will be trained on in time, and makes batches of it.

    batch_size: episodes of a step for each data-parallel rank (they get about equal numbers of tokens, not of
    episodes); max_policy_age: versions the trainer may be ahead of the policy that sampled an episode, which
    nothing exceeds that is trained on; dp_size: data-parallel ranks of the trainer; sync_interval: training
    steps from one update of the generator to the next. The generator is taken to be updated before the next
    step begins, unless the buffer is told otherwise (`generating`). normalize_advantages: those of each
    batch, all ranks together, are whitened when it is sampled (see forge.rl.advantage.whiten).

    strategy: which groups are preferred, as far as all that was let in can still be trained on in time:
    "oldest", "newest" or "prioritized" (see buffer.choice; buffer.slack has the argument). reuse: batches
    that an episode may be in, at different versions. max_episodes: `add` of groups that no rollout was let
    in for waits while so many or more could be handed out (so there may be more by what one `add` brings);
    None: never. num_steps: training steps of the whole run, versions 0 to num_steps - 1: no rollout is let in
    that none of them would train on; None: there is no last one.

    Everything that changes the buffer is in its journal before the caller knows of it. The process that
    takes the place of a killed one goes on from there, and a call that is repeated has its effect once: so
    no episode is lost, and none is trained on more often than it may. Episode ids must be unique.
    """

    recovers: ClassVar[bool] = True

    def __init__(
        self,
        batch_size: int,
        max_policy_age: int,
        dp_size: int = 1,
        sync_interval: int = 1,
        normalize_advantages: bool = False,
        strategy: Strategy = "oldest",
        reuse: int = 1,
        max_episodes: int | None = None,
        num_steps: int | None = None,
    ) -> None:
        if batch_size < 1 or dp_size < 1 or max_policy_age < 0:
            raise ConfigError(
                "ReplayBuffer needs batch_size >= 1, dp_size >= 1 and max_policy_age >= 0, "
                f"got {batch_size}, {dp_size} and {max_policy_age}"
            )
        self._terms = Terms(
            batch_size * dp_size, max_policy_age, sync_interval, strategy, reuse, max_episodes, num_steps
        )
        self._batch_size = batch_size
        self._dp_size = dp_size
        self._normalize_advantages = normalize_advantages
        self._queue = EpisodeQueue(self._terms)
        self._journal: Journal | None = None
        self._to_admit, self._to_add, self._to_sample = Turns(), Turns(), Turns()

    async def setup(self) -> None:
        """Goes on where the process before this one was killed."""
        if self.state_dir is None:
            return
        self._journal = Journal(self.state_dir / "replay_buffer.journal")
        for found in self._journal.records:
            if isinstance(found, EpisodeQueue):
                self._queue = found
            else:
                self._queue.apply(found)
        self._journal.records.clear()

    @endpoint(retry=True)
    async def admit(self, num_episodes: int) -> int:
        """Waits until a rollout of so many episodes would still be fresh when its turn comes, whatever the
        others do (see buffer.admission); gives it the number of the question to ask: 0, 1, 2, ..., each once.

        It brings them as the group `str(number)`, all in one `add`, and they are trained on. `sample` waits
        for it rather than let faster ones overtake it until it is too old. Rollouts are let in in the order
        of their calls. Numbers that were under way when a state was taken come first after it was loaded, the
        lowest first, without waiting, in their old places.
        """
        call = call_id()
        if not self._is_done(call):
            await self._to_admit.wait(call, lambda: self._is_done(call) or self._queue.has_room(num_episodes))
        return self._number(Admitted(call, num_episodes, self._queue.generates()))

    @endpoint(retry=True)
    async def restart(self, number: int) -> int:
        """A rollout that was let in under this number asks another question, whose number it gets, as nothing
        is to be learned from what it has: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2), without
        bias.

        It goes on in its own place, once this returns, and nobody else gets it: so what comes of a place is
        the first useful group of prompts drawn one after the other, however long each of them took, and
        prompts that are answered fast don't crowd out slow ones. It counts as begun now: what it brings is
        of the version that generates now, or a newer one, and may wait that much longer.

        Raises ForgeError for a number that no rollout has, and after `MAX_FUTILE` restarts in a row.
        """
        call = call_id()
        if not self._is_done(call) and number not in self._queue.rollouts:
            raise ForgeError(
                f"question {number} can't be given up: no rollout was given it by admit() or restart(), "
                "or its group has been added already, or it was given up before"
            )
        next_number = self._number(Restarted(call, number, self._queue.generates()))
        if (num_futile := self._queue.counts.num_futile) >= MAX_FUTILE:
            raise ForgeError(
                f"the last {num_futile} groups were given up, one after the other: nothing is trained on. "
                "With dynamic sampling look at the rewards (reward/zero_variance_groups): prompts that are "
                "all too easy or all too hard, or a reward function that can't tell answers apart, leave "
                "nothing to learn; else at what rejects the groups (checks/num_rejected)"
            )
        return next_number

    @endpoint(retry=True)
    async def add(self, *episodes: Episode) -> None:
        """Takes episodes; those of one group, added together, stay together. None is taken a second time.

        Where `max_episodes` could be handed out, it waits, unless a rollout was let in for every group.
        """
        call = call_id()
        if not self._is_done(call) and not self._queue.may_add(episodes):
            await self._to_add.wait(call, lambda: self._is_done(call) or self._queue.may_add(episodes))
        num_repeated = self._queue.counts.num_repeated
        self._commit(Added(call, tuple(compact(e) for e in episodes)))
        if num_repeated := self._queue.counts.num_repeated - num_repeated:
            logger.warning(
                "%d of the %d episodes of group %s are in the replay buffer already, or were: not taken "
                "again; every episode needs an id of its own",
                num_repeated,
                len(episodes),
                episodes[0].group_id,
            )

    @endpoint(retry=True)
    async def sample(
        self,
        curr_policy_version: int,
        batch_size: int | None = None,
        wait: bool = False,
        minibatches: int = 1,
    ) -> TrainBatch | list[TrainBatch] | None:
        """Fresh episodes, `batch_size` (the buffer's own when None) times the data-parallel ranks, shared out
        to them, in an arrangement that depends on which they are alone (see forge.rl.arrange). With several
        `minibatches`, a list of as many batches, of equal numbers of episodes.

        None while there are too few, or those that there are would make a rollout under way come too late;
        with `wait`, returns only when it can. `episode_ids` of the targets say which they are.
        """
        call, wanted = call_id(), self._wanted(batch_size)
        check_minibatches(wanted, self._dp_size, minibatches)
        self._advance(curr_policy_version)
        if wait and not self._is_ready(call, wanted):
            await self._to_sample.wait(call, lambda: self._is_ready(call, wanted))
        if not self._is_ready(call, wanted):
            return None
        self._commit(Sampled(call, wanted))
        batch = self._queue.history.batch_of(call)
        if batch is None:
            raise ForgeError(f"the batch of call {call} was handed out long ago and is no longer kept")
        ages = [batch.version - e.policy_version for e in batch.episodes]
        record("staleness", mean=sum(ages) / len(ages), age_max=max(ages))
        episodes = self._as_trained(batch)
        if minibatches == 1:
            return arrange(episodes, self._dp_size)
        return arrange_minibatches(episodes, self._dp_size, minibatches)

    @endpoint(retry=True)
    async def ready(self, curr_policy_version: int, batch_size: int | None = None) -> None:
        """Returns when a `sample` with the same arguments would have a batch: that need not wait then."""
        self._advance(curr_policy_version)
        wanted = self._wanted(batch_size)
        if not self._queue.is_ready(wanted):
            await self._to_sample.wait(call_id(), lambda: self._queue.is_ready(wanted))
            self._wake()

    @endpoint(retry=True)
    async def sampled(self) -> list[Episode]:
        """The episodes of the newest batch, by number, with the advantages that were trained on; none after a
        state was loaded, before the next batch."""
        batch = self._queue.history.newest_batch
        return [] if batch is None else list(self._as_trained(batch))

    @endpoint(retry=True)
    async def generating(self, version: int) -> None:
        """Takes note that every generator holds this version, or a newer one, from now on.

        Where updates go on beside the training steps, tell it before the first push (the version then is 0)
        and after each update; rollouts are then let in by what they will really be sampled from.
        """
        if self._queue.generating is None or version > self._queue.generating:
            self._commit(Generating(version))

    @endpoint(retry=True)
    async def bound(self, max_policy_age: int) -> None:
        """From now on rollouts are let in by this age; what was let in before is not dropped for it.

        ConfigError for more than the buffer's own `max_policy_age`, or less than updates allow.
        """
        self._terms.check_bound(max_policy_age)
        self._commit(Bounded(call_id(), max_policy_age))

    @endpoint(retry=True)
    async def state_dict(self) -> dict[str, Any]:
        """What waits, which numbers are under way, and all counts: plain data and episodes."""
        return self._queue.state()

    @endpoint(retry=True)
    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """All is as it was when the state was taken, but nobody works on the numbers that were under way:
        `admit` hands them out again. Which version generates is not known until it is told (`generating`)."""
        self._commit(Loaded(call_id(), state))

    @endpoint(retry=True)
    async def size(self) -> int:
        """Episodes that wait, those among them that may be handed out again."""
        return len(self._queue)

    @endpoint(retry=True)
    async def info(self) -> BufferInfo:
        """Counts that show that no episode was lost."""
        return self._queue.info()

    def _number(self, event: Admitted | Restarted) -> int:
        number = self._commit(event)
        if number is None:
            raise ForgeError(f"call {event.call} was answered long ago: its number is no longer kept")
        return number

    def _commit(self, event: Event) -> int | None:
        """Journal first, then the queue: what the queue shows is never lost. Never awaits."""
        if not isinstance(event, Advanced | Generating) and self._is_done(event.call):
            return self._queue.history.answer_of(event.call)
        num_dropped = self._queue.counts.num_dropped
        if self._journal is not None:
            self._journal.append(event)
        answer = self._queue.apply(event)
        if self._journal is not None and self._journal.has_outgrown:
            self._journal.rewrite([self._queue])
        self._wake()
        if num_dropped := self._queue.counts.num_dropped - num_dropped:
            record("buffer", num_dropped_stale=num_dropped)
        if isinstance(event, Restarted):
            record("buffer", num_restarted=1)
        return answer

    def _wake(self) -> None:
        for turns in (self._to_admit, self._to_add, self._to_sample):
            turns.wake()

    def _advance(self, version: int) -> None:
        if version > self._queue.version:
            self._commit(Advanced(version))

    def _wanted(self, batch_size: int | None) -> int:
        wanted = (batch_size or self._batch_size) * self._dp_size
        self._terms.check_batch(wanted)
        return wanted

    def _is_done(self, call: str | None) -> bool:
        return self._queue.history.is_done(call)

    def _is_ready(self, call: str | None, wanted: int) -> bool:
        return self._is_done(call) or self._queue.is_ready(wanted)

    def _as_trained(self, batch: Batch) -> Sequence[Episode]:
        return _whitened(batch.episodes) if self._normalize_advantages else batch.episodes


def _whitened(episodes: Sequence[Episode]) -> list[Episode]:
    white = whiten(advantages_of(episodes))
    return [dataclasses.replace(e, advantage=advantage) for e, advantage in zip(episodes, white, strict=True)]
