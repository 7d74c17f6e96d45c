"""[4] Rollouts under way: which question each has, and how old what it brings may be."""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Rollout:
    """One that was let in and has not brought its group yet."""

    num_episodes: int
    version: int  # that generated when it began: what it brings is not older
    place: int  # in the order in which rollouts were let in


@dataclass(slots=True)
class Rollouts:
    """By the numbers of their questions: 0, 1, 2, ..., each given once."""

    next_number: int = 0
    num_places: int = 0  # that were given, to rollouts and to groups that came without one
    num_episodes: int = 0  # that are to be brought
    num_by_version: Counter[int] = field(default_factory=Counter)  # of these episodes
    _running: dict[int, Rollout] = field(default_factory=dict)
    _to_redo: OrderedDict[int, None] = field(default_factory=OrderedDict)  # that nobody has, the lowest first

    def __contains__(self, number: int) -> bool:
        return number in self._running

    def __len__(self) -> int:
        return len(self._running)

    @property
    def has_to_redo(self) -> bool:
        """Whether there are some that nobody works on, as they came from a state."""
        return bool(self._to_redo)

    def number_of(self, group_id: str) -> int | None:
        """Of the rollout that is to bring this group; None where there is none."""
        number = int(group_id) if group_id.isdecimal() else None
        return number if number in self._running and str(number) == group_id else None

    def begin(self, num_episodes: int, version: int) -> int:
        """The lowest number that is to be done again, in its old place; else the next one."""
        if not self._to_redo:
            return self._give(Rollout(num_episodes, version, self.new_place()))
        number = next(iter(self._to_redo))
        old = self.end(number)
        self._put(number, Rollout(num_episodes, version, old.place))
        return number

    def restart(self, number: int, version: int) -> int:
        """The next number, in the place of this one."""
        return self._give(replace(self.end(number), version=version))

    def end(self, number: int) -> Rollout:
        """It has brought its group, or given up its question."""
        rollout = self._running.pop(number)
        self._to_redo.pop(number, None)
        self._count(rollout, -1)
        return rollout

    def new_place(self) -> int:
        """The last in the order."""
        self.num_places += 1
        return self.num_places

    def state(self) -> list[tuple[int, int, int]]:
        """Number, episodes and place of each."""
        return [(number, r.num_episodes, r.place) for number, r in self._running.items()]

    def load(self, state: list[tuple[int, int, int]], version: int) -> None:
        """Those of a state: nobody works on them, and what they bring will be of this version or newer."""
        for number, num_episodes, place in sorted(state):
            self._put(number, Rollout(num_episodes, version, place))
            self._to_redo[number] = None

    def _give(self, rollout: Rollout) -> int:
        number, self.next_number = self.next_number, self.next_number + 1
        self._put(number, rollout)
        return number

    def _put(self, number: int, rollout: Rollout) -> None:
        self._running[number] = rollout
        self._count(rollout, 1)

    def _count(self, rollout: Rollout, sign: int) -> None:
        self.num_episodes += sign * rollout.num_episodes
        self.num_by_version[rollout.version] += sign * rollout.num_episodes
        if not self.num_by_version[rollout.version]:
            del self.num_by_version[rollout.version]
