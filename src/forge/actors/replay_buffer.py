"""[4] ReplayBuffer: episodes wait here for the trainer, and rollouts for the trainer to catch up."""

import asyncio
import dataclasses
import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from forge.actors.episode_queue import Added, Admitted, Advanced, Batch, EpisodeQueue, Event, Sampled
from forge.controller import ForgeActor, call_id, endpoint
from forge.controller.journal import Journal
from forge.data_models import Episode, TrainInputs, TrainTargets
from forge.errors import ConfigError, ForgeError
from forge.observability.metrics import record
from forge.rl.balance import balance
from forge.rl.collate import collate

logger = logging.getLogger(__name__)

TrainBatch = tuple[list[TrainInputs], list[TrainTargets]]


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """Where all episodes are: num_added is always num_waiting + num_sampled + num_dropped."""

    version: int  # the trainer's, as far as the buffer knows
    num_admitted: int  # whose rollout was let in, less those dropped
    num_added: int
    num_waiting: int
    num_sampled: int
    num_dropped: int  # past their age
    num_repeated: int  # came again, and were not taken again


class ReplayBuffer(ForgeActor):
    """First in, first out; an episode older than `max_policy_age` versions is never trained on.

    batch_size: episodes of a step for each data-parallel rank (they get about equal numbers of tokens, not of
    episodes); max_policy_age: versions the trainer may be ahead of the policy that sampled an episode;
    dp_size: data-parallel ranks of the trainer; sync_interval: training steps from one update of the
    generator to the next.

    Everything that changes the buffer is in its journal before the caller knows of it. The process that
    takes the place of a killed one goes on from there, and a call that is repeated has its effect once: so
    no episode is lost, and none is trained on twice. Episode ids must be unique.
    """

    recovers: ClassVar[bool] = True

    def __init__(
        self, batch_size: int, max_policy_age: int, dp_size: int = 1, sync_interval: int = 1
    ) -> None:
        if batch_size < 1 or dp_size < 1 or max_policy_age < 0:
            raise ConfigError(
                "ReplayBuffer needs batch_size >= 1, dp_size >= 1 and max_policy_age >= 0, "
                f"got {batch_size}, {dp_size} and {max_policy_age}"
            )
        if max_policy_age < sync_interval - 1:
            raise ConfigError(
                f"max_policy_age={max_policy_age} is too small for sync_interval={sync_interval}: the policy "
                f"is up to {sync_interval - 1} versions old before each update; raise it, or sync more often"
            )
        self._batch_size = batch_size
        self._max_policy_age = max_policy_age
        self._dp_size = dp_size
        self._sync_interval = sync_interval
        self._queue = EpisodeQueue(max_policy_age)
        self._journal: Journal | None = None
        self._changed = asyncio.Condition()

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
    async def admit(self, num_episodes: int) -> None:
        """Waits until a rollout of so many episodes would still be fresh when its turn comes.

        The k-th episode is trained at version k // (batch_size * dp_size); it may start once that is at most
        `max_policy_age` ahead of the version that generates now (AReaL, arXiv 2505.24298, eq. 3). So nothing
        is generated that must be thrown away.
        """
        call = call_id()
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._queue.is_done(call) or self._queue.num_admitted < self._limit()
            )
            self._commit(Admitted(call, num_episodes))

    @endpoint(retry=True)
    async def add(self, *episodes: Episode) -> None:
        """Takes episodes; those of one group, added together, stay together. None is taken a second time."""
        call = call_id()
        async with self._changed:
            num_repeated = self._queue.num_repeated
            self._commit(Added(call, tuple(_compact(e) for e in episodes)))
            if num_repeated := self._queue.num_repeated - num_repeated:
                logger.warning(
                    "%d of the %d episodes of group %s are in the replay buffer already, or were: not taken "
                    "again; every episode needs an id of its own",
                    num_repeated,
                    len(episodes),
                    episodes[0].group_id,
                )

    @endpoint(retry=True)
    async def sample(
        self, curr_policy_version: int, batch_size: int | None = None, wait: bool = False
    ) -> TrainBatch | None:
        """The oldest fresh episodes, `batch_size` (the buffer's own when None) times the data-parallel ranks,
        shared out to them (see forge.rl.balance).

        None while there are too few; with `wait`, returns only when there are enough. `episode_ids` of the
        targets say which they are.
        """
        wanted = (batch_size or self._batch_size) * self._dp_size
        call = call_id()
        async with self._changed:
            if curr_policy_version > self._queue.version:
                self._commit(Advanced(curr_policy_version))
            if wait:
                await self._changed.wait_for(lambda: self._queue.is_done(call) or len(self._queue) >= wanted)
            if not self._queue.is_done(call) and len(self._queue) < wanted:
                return None
            self._commit(Sampled(call, wanted))
            batch = self._queue.batch_of(call)
        if batch is None:
            raise ForgeError(f"the batch of call {call} was handed out long ago and is no longer kept")
        return self._collate(batch)

    @endpoint(retry=True)
    async def size(self) -> int:
        """Episodes that wait."""
        return len(self._queue)

    @endpoint(retry=True)
    async def info(self) -> BufferInfo:
        """Counts that show that no episode was lost."""
        q = self._queue
        return BufferInfo(
            version=q.version,
            num_admitted=q.num_admitted,
            num_added=q.num_added,
            num_waiting=len(q),
            num_sampled=q.num_sampled,
            num_dropped=q.num_dropped,
            num_repeated=q.num_repeated,
        )

    def _commit(self, event: Event) -> None:
        """Journal first, then the queue: what the queue shows is never lost. Holds the lock; never awaits."""
        if not isinstance(event, Advanced) and self._queue.is_done(event.call):
            return
        num_dropped = self._queue.num_dropped
        if self._journal is not None:
            self._journal.append(event)
        self._queue.apply(event)
        if self._journal is not None and self._journal.has_outgrown:
            self._journal.rewrite([self._queue])
        self._changed.notify_all()
        if num_dropped := self._queue.num_dropped - num_dropped:
            record("buffer", num_dropped_stale=num_dropped)

    def _limit(self) -> int:
        """How many episodes may have been admitted at the current version."""
        generating = self._queue.version - self._queue.version % self._sync_interval
        return (generating + self._max_policy_age + 1) * self._batch_size * self._dp_size

    def _collate(self, batch: Batch) -> TrainBatch:
        ages = [batch.version - e.policy_version for e in batch.episodes]
        record("staleness", mean=sum(ages) / len(ages), age_max=max(ages))
        return collate(balance(batch.episodes, self._dp_size))


def _compact(episode: Episode) -> Episode:
    """The same without the rest of larger tensors that its own are slices of: pickling would write those."""
    completion = dataclasses.replace(episode.completion, **_own_tensors(episode.completion))
    return dataclasses.replace(episode, completion=completion, **_own_tensors(episode))


def _own_tensors(data: Any) -> dict[str, Tensor]:
    values = {f.name: getattr(data, f.name) for f in dataclasses.fields(data)}
    return {
        name: value.detach().clone()
        for name, value in values.items()
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes
    }
