"""[4] Groups of episodes that wait to be handed out."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from forge.data_models import Episode


@dataclass(frozen=True, slots=True)
class Group:
    """Episodes of one group that came together: they are handed out together as far as batches allow."""

    place: int  # in the order in which rollouts were let in
    episodes: tuple[Episode, ...]
    version: int  # the oldest policy of them
    priority: float  # the mean absolute advantage, of the whole group
    is_promised: bool = False  # its rollout was let in: it is trained on at least once
    num_uses: int = 0  # how often it was handed out
    used_at: int = -1  # the trainer's version when it was handed out last; -1: never

    def part(self, episodes: Sequence[Episode]) -> "Group":
        """Some of it, in the same place."""
        version = min(e.policy_version for e in episodes)
        return replace(self, episodes=tuple(episodes), version=version)

    def used(self, version: int) -> "Group":
        """The same after it was handed out once more, at this version of the trainer."""
        return replace(self, num_uses=self.num_uses + 1, used_at=version)


def group_of(place: int, episodes: Sequence[Episode], is_promised: bool = False) -> Group:
    """Episodes that came together."""
    priority = sum(_magnitude(e.advantage) for e in episodes) / len(episodes)
    version = min(e.policy_version for e in episodes)
    return Group(place, tuple(episodes), version, priority, is_promised)


def _magnitude(advantage: float | Tensor) -> float:
    return float(advantage.abs().mean()) if isinstance(advantage, Tensor) else abs(advantage)


@dataclass(slots=True)
class Groups:
    """Those that wait, with counts that say at once what could be handed out."""

    reuse: int
    num_episodes: int = 0
    num_fresh: int = 0  # episodes that were never handed out
    num_promised: int = 0  # of these, whose rollout was let in
    num_uses: int = 0  # that promised episodes may still be put to, all together
    promised_by_version: Counter[int] = field(default_factory=Counter)  # fresh ones, by their group's version
    num_by_use: Counter[int] = field(default_factory=Counter)  # episodes, by `used_at`
    _serial: int = 0
    _by_version: dict[int, dict[int, Group]] = field(default_factory=dict)  # then by the order of coming
    _ids: set[str] = field(default_factory=set)  # of the episodes

    def __iter__(self) -> Iterator[tuple[int, Group]]:
        """With the numbers by which they are taken."""
        return (item for groups in self._by_version.values() for item in groups.items())

    def __contains__(self, episode_id: str) -> bool:
        return episode_id in self._ids

    def put(self, group: Group) -> None:
        """It waits from now on."""
        self._serial += 1
        self._by_version.setdefault(group.version, {})[self._serial] = group
        self._count(group, 1)

    def take(self, serial: int, group: Group) -> None:
        """It does not wait any more."""
        groups = self._by_version[group.version]
        del groups[serial]
        if not groups:
            del self._by_version[group.version]
        self._count(group, -1)

    def older_than(self, version: int) -> list[tuple[int, Group]]:
        """Groups with an episode of a policy older than this version."""
        old = sorted(v for v in self._by_version if v < version)
        return [item for v in old for item in self._by_version[v].items()]

    def state(self) -> list[dict[str, Any]]:
        """As plain data and episodes."""
        return [{name: getattr(group, name) for name in Group.__slots__} for _, group in self]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Those of a state wait, too."""
        for group in state:
            self.put(Group(**group))

    def _count(self, group: Group, sign: int) -> None:
        num = sign * len(group.episodes)
        self.num_episodes += num
        _tally(self.num_by_use, group.used_at, num)
        if not group.num_uses:
            self.num_fresh += num
        if group.is_promised:
            self.num_uses += num * (self.reuse - group.num_uses)
            if not group.num_uses:
                self.num_promised += num
                _tally(self.promised_by_version, group.version, num)
        ids = [e.episode_id for e in group.episodes]
        (self._ids.update if sign > 0 else self._ids.difference_update)(ids)


def _tally(counter: Counter[int], key: int, num: int) -> None:
    """Adds to one count; those of 0 are left out."""
    counter[key] += num
    if not counter[key]:
        del counter[key]
