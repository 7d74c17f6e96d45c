"""[4] EpisodeQueue: what a replay buffer holds and remembers, as a fold over the events of its life."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.actors.buffer.admission import Load, has_room
from forge.actors.buffer.choice import choose
from forge.actors.buffer.counts import BufferInfo, Counts
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
from forge.actors.buffer.groups import Group, Groups, group_of
from forge.actors.buffer.history import Batch, History
from forge.actors.buffer.rollouts import Rollouts
from forge.actors.buffer.slack import Slack
from forge.actors.buffer.terms import Terms
from forge.data_models import Episode
from forge.rl.arrange import in_order


@dataclass(slots=True)
class EpisodeQueue:
    """No episode in more than `terms.reuse` batches, none past its age, none twice at one version.

    Nothing but `apply` changes it, and the same events always lead to the same state: a process that takes
    the place of a killed one applies the events from the journal, and is where the other was.
    """

    terms: Terms
    version: int = 0  # the trainer's
    generating: int | None = None  # the version that generates; None: as nobody has told it
    bound: int = -1  # that rollouts are let in by
    sampled_at: int = -1  # the version of the newest batch
    counts: Counts = field(default_factory=Counts)
    rollouts: Rollouts = field(default_factory=Rollouts)
    groups: Groups = field(init=False)
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        self.bound = self.terms.max_policy_age
        self.groups = Groups(self.terms.reuse)

    def __len__(self) -> int:
        return self.groups.num_episodes

    def __iter__(self) -> Iterator[Episode]:
        return (episode for _, group in self.groups for episode in group.episodes)

    def generates(self) -> int:
        """The version that generates now; while nobody tells it, as if each update were there at once."""
        if self.generating is not None:
            return self.generating
        return self.version - self.version % self.terms.sync_interval

    def has_room(self, num_episodes: int) -> bool:
        """Whether a rollout of so many may begin."""
        if self.rollouts.has_to_redo:
            return True
        num_running = self.rollouts.num_episodes
        load = Load(
            generating=self.generates(),
            next_version=max(self.version, self.generating or 0, self.sampled_at + 1),
            bound=self.bound,
            num_promised=num_running + self.groups.num_promised,
            num_uses=num_running * self.terms.reuse + self.groups.num_uses,
            num_available=num_running + self.groups.num_episodes,
        )
        return has_room(num_episodes, load, self.terms)

    @property
    def num_available(self) -> int:
        """Episodes that may be handed out now: those that wait, but for those that were at this version."""
        return len(self) - self.groups.num_by_use[self.version]

    def is_ready(self, num_episodes: int) -> bool:
        """Whether so many can be taken such that all that was promised can still be kept (see `slack`)."""
        if self.num_available < num_episodes:
            return False
        waiting = self._by_due(self.groups.promised_by_version)
        num_others = self.num_available - self.groups.num_promised
        return self._slack(num_episodes).can_fill(waiting, num_others)

    def may_add(self, episodes: Sequence[Episode]) -> bool:
        """Whether these may come now: their rollouts were let in, or fewer are available than may be."""
        limit = self.terms.max_episodes
        return (
            limit is None
            or self.num_available < limit
            or all(self.rollouts.number_of(e.group_id) is not None for e in episodes)
        )

    def info(self) -> BufferInfo:
        """Where all episodes are."""
        return BufferInfo(
            version=self.version,
            next_number=self.rollouts.next_number,
            num_running=len(self.rollouts),
            num_waiting=self.groups.num_fresh,
            **self._counts(),
        )

    def apply(self, event: Event) -> int | None:
        """The effect of one event; the number that it gives. Those of a call that is done have none."""
        match event:
            case Advanced(version):
                self._advance(version)
                return None
            case Generating(version):
                self.generating = max(self.generating or 0, version)
                return None
            case _ if self.history.is_done(event.call):
                return self.history.answer_of(event.call)
        answer = self._apply(event)
        self.history.note_done(event.call, answer)
        return answer

    def state(self) -> dict[str, Any]:
        """All but what belongs to this process and its calls: plain data and episodes."""
        return {
            "version": self.version,
            "bound": self.bound,
            "sampled_at": self.sampled_at,
            "counts": self._counts(),
            "next_number": self.rollouts.next_number,
            "num_places": self.rollouts.num_places,
            "running": self.rollouts.state(),
            "waiting": self.groups.state(),
            "gone": self.history.gone,
        }

    def _apply(self, event: Event) -> int | None:
        match event:
            case Admitted(_, num_episodes, version):
                self.counts.num_admitted += num_episodes
                return self.rollouts.begin(num_episodes, version)
            case Restarted(_, number, version):
                self.counts.num_restarted += 1
                self.counts.num_futile += 1
                return self.rollouts.restart(number, version)
            case Added(_, episodes):
                self._add(episodes)
            case Bounded(_, age):
                self.bound = age
            case Sampled(call, num_episodes):
                self._sample(call, num_episodes)
            case Loaded(_, state):
                self._load(state)
        return None

    def _load(self, state: dict[str, Any]) -> None:
        self.version, self.generating = state["version"], None
        self.bound, self.sampled_at = state["bound"], state["sampled_at"]
        self.counts = Counts(**state["counts"])
        self.rollouts = Rollouts(state["next_number"], state["num_places"])
        self.rollouts.load(state["running"], self.version)
        self.groups = Groups(self.terms.reuse)
        self.groups.load(state["waiting"])
        self.history.load(state["gone"])

    def _advance(self, version: int) -> None:
        self.version = max(self.version, version)
        self._drop_older_than(self.version - self.terms.max_policy_age)

    def _drop_older_than(self, version: int, *, only_used: bool = False) -> None:
        for serial, group in self.groups.older_than(version):
            if only_used and not group.num_uses:
                continue
            self.groups.take(serial, group)
            if young := [e for e in group.episodes if e.policy_version >= version]:
                self.groups.put(group.part(young))
            self._forget([e for e in group.episodes if e.policy_version < version], group.num_uses)

    def _add(self, episodes: tuple[Episode, ...]) -> None:
        self.counts.num_futile = 0
        by_group: dict[str, list[Episode]] = {e.group_id: [] for e in episodes}
        seen: set[str] = set()
        for episode in episodes:
            id = episode.episode_id
            if id in seen or id in self.groups or self.history.has_left(id):
                self.counts.num_repeated += 1
            else:
                seen.add(id)
                by_group[episode.group_id].append(episode)
        for group_id, members in by_group.items():
            self._add_group(group_id, members)

    def _add_group(self, group_id: str, episodes: list[Episode]) -> None:
        """The rollout that was to bring it ends by that, whatever it brings: no promise stays behind."""
        number = self.rollouts.number_of(group_id)
        place = self.rollouts.new_place() if number is None else self.rollouts.end(number).place
        self.counts.num_added += len(episodes)
        oldest = self.version - self.terms.max_policy_age
        if young := [e for e in episodes if e.policy_version >= oldest]:
            self.groups.put(group_of(place, young, is_promised=number is not None))
        self._forget([e for e in episodes if e.policy_version < oldest], num_uses=0)

    def _sample(self, call: str | None, num_episodes: int) -> None:
        taken: list[Episode] = []
        slack = self._slack(num_episodes)
        available = ((serial, group) for serial, group in self.groups if group.used_at < self.version)
        for serial, group, size in choose(available, self.terms.strategy, slack, self._due):
            self.groups.take(serial, group)
            if rest := group.episodes[size:]:
                self.groups.put(group.part(rest))
            part = group.part(group.episodes[:size])
            taken += part.episodes
            self._use(part)
        self.sampled_at = max(self.sampled_at, self.version)
        self._drop_older_than(self.version + 1 - self.terms.max_policy_age, only_used=True)
        self.history.note_batch(call, Batch(tuple(in_order(taken)), self.version))

    def _use(self, group: Group) -> None:
        if group.num_uses:
            self.counts.num_reused += len(group.episodes)
        else:
            self.counts.num_sampled += len(group.episodes)
        used = group.used(self.version)
        if used.num_uses < self.terms.reuse:
            self.groups.put(used)
        else:
            self._forget(used.episodes, used.num_uses)

    def _slack(self, num_episodes: int) -> Slack:
        waiting = self._by_due(self.groups.promised_by_version)
        running = self._by_due(self.rollouts.num_by_version)
        return Slack(waiting, running, self.version, num_episodes, self.terms.num_per_step)

    def _by_due(self, num_by_version: Counter[int]) -> dict[int, int]:
        return {version + self.terms.max_policy_age: num for version, num in num_by_version.items()}

    def _due(self, group: Group) -> int | None:
        """When it must be trained on; None where nothing was promised, or it was kept already."""
        is_due = group.is_promised and not group.num_uses
        return group.version + self.terms.max_policy_age if is_due else None

    def _forget(self, episodes: Sequence[Episode], num_uses: int) -> None:
        """They leave for good; those never handed out are dropped."""
        if not num_uses:
            self.counts.num_dropped += len(episodes)
        self.history.note_gone(e.episode_id for e in episodes)

    def _counts(self) -> dict[str, int]:
        return {name: getattr(self.counts, name) for name in Counts.__slots__}
