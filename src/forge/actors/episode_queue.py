"""[4] EpisodeQueue: what a replay buffer holds and remembers, as a fold over the events of its life."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from forge.data_models import Episode

# Of what is over, so much is remembered: far more than the calls that a lost process can have been serving.
REMEMBERED_CALLS = 4096
REMEMBERED_BATCHES = 4  # one is asked for at a time
REMEMBERED_EPISODES = 2**16  # an episode that comes back still later is past its age


@dataclass(frozen=True, slots=True)
class Admitted:
    """Rollouts of so many episodes were let in by a call."""

    call: str | None
    num_episodes: int


@dataclass(frozen=True, slots=True)
class Added:
    """A call brought episodes."""

    call: str | None
    episodes: tuple[Episode, ...]


@dataclass(frozen=True, slots=True)
class Advanced:
    """The trainer reached a version."""

    version: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """A call took the oldest episodes."""

    call: str | None
    num_episodes: int


Event = Admitted | Added | Advanced | Sampled


@dataclass(frozen=True, slots=True)
class Batch:
    """Episodes that were taken together, and the trainer's version then."""

    episodes: tuple[Episode, ...]
    version: int


@dataclass(slots=True)
class EpisodeQueue:
    """First in, first out, no episode twice, none past its age.

    Nothing but `apply` changes it, and the same events always lead to the same state: a process that takes
    the place of a killed one applies the events from the journal, and is where the other was.
    """

    max_policy_age: int
    version: int = 0
    num_admitted: int = 0  # episodes whose rollout was let in, less those dropped
    num_added: int = 0
    num_repeated: int = 0  # added again, and therefore not taken
    num_sampled: int = 0
    num_dropped: int = 0  # past their age
    _waiting: OrderedDict[str, Episode] = field(default_factory=OrderedDict)  # by episode id
    # The newest of what is over; the values say nothing.
    _gone: OrderedDict[str, None] = field(default_factory=OrderedDict)  # episode ids
    _done: OrderedDict[str, None] = field(default_factory=OrderedDict)  # call ids
    _batches: OrderedDict[str | None, Batch] = field(default_factory=OrderedDict)  # by call id

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Episode]:
        return iter(self._waiting.values())

    def is_done(self, call: str | None) -> bool:
        """Whether this call has had its effect."""
        return call in self._done

    def batch_of(self, call: str | None) -> Batch | None:
        """What the call took, as long as that is remembered."""
        return self._batches.get(call)

    def apply(self, event: Event) -> None:
        """The effect of one event. Those of a call that is done already have none."""
        match event:
            case Advanced(version):
                self._advance(version)
                return
            case _ if self.is_done(event.call):
                return
            case Admitted(_, num_episodes):
                self.num_admitted += num_episodes
            case Added(_, episodes):
                self._add(episodes)
            case Sampled(call, num_episodes):
                self._sample(call, num_episodes)
        if event.call is not None:
            self._done[event.call] = None
            _forget_oldest(self._done, REMEMBERED_CALLS)

    def _advance(self, version: int) -> None:
        self.version = max(self.version, version)
        for episode in [e for e in self if self._is_stale(e)]:
            self._drop(self._waiting.pop(episode.episode_id))

    def _add(self, episodes: tuple[Episode, ...]) -> None:
        for episode in episodes:
            if episode.episode_id in self._waiting or episode.episode_id in self._gone:
                self.num_repeated += 1
                continue
            self.num_added += 1
            if self._is_stale(episode):
                self._drop(episode)
            else:
                self._waiting[episode.episode_id] = episode

    def _sample(self, call: str | None, num_episodes: int) -> None:
        taken = [self._waiting.popitem(last=False)[1] for _ in range(num_episodes)]
        for episode in taken:
            self._remember_gone(episode)
        self.num_sampled += num_episodes
        self._batches[call] = Batch(tuple(taken), self.version)
        self._batches.move_to_end(call)
        _forget_oldest(self._batches, REMEMBERED_BATCHES)

    def _drop(self, episode: Episode) -> None:
        """It leaves untrained; another may be admitted in its place."""
        self.num_dropped += 1
        self.num_admitted -= 1
        self._remember_gone(episode)

    def _remember_gone(self, episode: Episode) -> None:
        self._gone[episode.episode_id] = None
        _forget_oldest(self._gone, REMEMBERED_EPISODES)

    def _is_stale(self, episode: Episode) -> bool:
        return episode.policy_version < self.version - self.max_policy_age


def _forget_oldest(memory: OrderedDict, limit: int) -> None:
    while len(memory) > limit:
        memory.popitem(last=False)
