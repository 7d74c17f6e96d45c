"""[4] ReplayBuffer: episodes wait here for the trainer, and rollouts for the trainer to catch up."""

import asyncio
from collections import deque

from forge.controller import ForgeActor, endpoint
from forge.data_models import Episode, TrainInputs, TrainTargets
from forge.errors import ConfigError
from forge.observability.metrics import record
from forge.rl.collate import collate

TrainBatch = tuple[list[TrainInputs], list[TrainTargets]]


class ReplayBuffer(ForgeActor):
    """First in, first out; an episode older than `max_policy_age` versions is never trained on.

    batch_size: episodes a data-parallel rank gets each step; max_policy_age: versions the trainer may be
    ahead of the policy that sampled an episode; dp_size: data-parallel ranks of the trainer; sync_interval:
    training steps from one update of the generator to the next.
    """

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
        self._waiting: deque[Episode] = deque()
        self._version = 0
        self._admitted = 0  # episodes whose rollout was let in
        self._changed = asyncio.Condition()

    @endpoint
    async def admit(self, num_episodes: int) -> None:
        """Waits until a rollout of so many episodes would still be fresh when its turn comes.

        The k-th episode is trained at version k // (batch_size * dp_size); it may start once that is at most
        `max_policy_age` ahead of the version that generates now (AReaL, arXiv 2505.24298, eq. 3). So nothing
        is generated that must be thrown away.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._admitted < self._limit())
            self._admitted += num_episodes

    @endpoint
    async def add(self, *episodes: Episode) -> None:
        """Takes episodes; those of one group, added together, stay together."""
        async with self._changed:
            self._waiting.extend(episodes)
            self._changed.notify_all()

    @endpoint
    async def sample(
        self, curr_policy_version: int, batch_size: int | None = None, wait: bool = False
    ) -> TrainBatch | None:
        """The oldest fresh episodes, `batch_size` (the buffer's own when None) for each data-parallel rank.

        None while there are too few; with `wait`, returns only when there are enough.
        """
        wanted = (batch_size or self._batch_size) * self._dp_size
        async with self._changed:
            self._version = max(self._version, curr_policy_version)
            self._drop_stale()
            self._changed.notify_all()
            if wait:
                await self._changed.wait_for(lambda: len(self._waiting) >= wanted)
            if len(self._waiting) < wanted:
                return None
            chosen = [self._waiting.popleft() for _ in range(wanted)]
        share = wanted // self._dp_size
        ages = [self._version - e.policy_version for e in chosen]
        record("staleness", mean=sum(ages) / len(ages), age_max=max(ages))
        return collate([chosen[i : i + share] for i in range(0, wanted, share)])

    @endpoint
    async def size(self) -> int:
        """Episodes that wait."""
        return len(self._waiting)

    def _limit(self) -> int:
        """How many episodes may have been admitted at the current version."""
        generating = self._version - self._version % self._sync_interval
        return (generating + self._max_policy_age + 1) * self._batch_size * self._dp_size

    def _drop_stale(self) -> None:
        """Episodes past their age leave, and as many may be admitted anew."""
        oldest = self._version - self._max_policy_age
        fresh = [e for e in self._waiting if e.policy_version >= oldest]
        num_dropped = len(self._waiting) - len(fresh)
        if num_dropped:
            self._waiting = deque(fresh)
            self._admitted -= num_dropped
            record("buffer", num_dropped_stale=num_dropped)
