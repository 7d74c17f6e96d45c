"""Registry: which versions there are, what they are made of, and who reads them. Knows nothing of processes
and waiting: see registry_actor."""

import itertools
from dataclasses import dataclass, field

from forge.errors import ForgeError, WeightsMissing
from forge.weights.keys import PartKey
from forge.weights.process import Process

HOLD_S = 10.0
"""How long a reader on another host may be silent before its hold is taken for that of a dead one."""
_RETIRED = "was retired"
_NUM_NOTES = 1000


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One rank's part that lies in a volume."""

    key: PartKey
    volume: str
    index: bytes  # a pickled Part: only readers look inside


@dataclass(frozen=True, slots=True)
class Reader:
    """One fetch of one process."""

    process: Process
    serial: int


@dataclass(slots=True, eq=False)
class Version:
    """What there is of a version, from the first rank that begins to push it to the end of its retiring.

    When it is pushed again that is another Version.
    """

    number: int
    world_size: int
    publisher: str
    begun: dict[int, tuple[PartKey, Process]] = field(default_factory=dict)  # by rank
    parts: dict[int, StoredPart] = field(default_factory=dict)  # by rank
    holds: dict[Reader, float] = field(default_factory=dict)  # when each reader was last heard of
    failure: str | None = None
    is_retiring: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.parts) == self.world_size and self.failure is None

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Those of all keys that anything of it may be stored under."""
        return tuple(key.prefix for key, _ in self.begun.values())

    @property
    def volumes(self) -> set[str]:
        return {part.volume for part in self.parts.values()}


class Registry:
    """Each method is told the time, in seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self._versions: dict[int, Version] = {}
        self._gone: dict[int, str] = {}  # why a version that was complete is no more
        self._last: tuple[int, str, float] | None = None  # completed last: version, publisher, when
        self.newest_lost: tuple[int, str] | None = None
        """Of what was complete and went with its volume, and why; None once one as new is complete."""
        self._attempts = itertools.count()

    # --- publishing ---

    def begin(self, version: int, rank: int, world_size: int, publisher: str, writer: Process) -> PartKey:
        """Claims a rank's part of a version. Raises ForgeError when that was done before, or can't be now."""
        found = self._versions.get(version)
        if found is not None:
            self._refuse(found, rank, world_size)
        else:
            found = self._versions[version] = Version(version, world_size, publisher)
            self._gone.pop(version, None)
        key = PartKey(version, rank, world_size, next(self._attempts))
        found.begun[rank] = key, writer
        return key

    def _refuse(self, found: Version, rank: int, world_size: int) -> None:
        name = f"version {found.number} of the weights"
        if found.is_retiring:
            raise ForgeError(f"{name} is being retired: wait for retire({found.number})")
        if found.failure is not None:
            raise ForgeError(f"{name} can't be published, {found.failure}: retire it first")
        if rank in found.begun or world_size != found.world_size:
            ranks = ", ".join(f"rank {r} of {found.world_size}" for r in sorted(found.begun))
            raise ForgeError(
                f"{name} is already published by {ranks}: versions are immutable, "
                "retire it or publish another version"
            )

    def publish(self, part: StoredPart, now: float) -> None:
        """A part is stored. Raises WeightsMissing where nobody can read it, for the reason that it names."""
        found = self._versions.get(part.key.version)
        name = f"version {part.key.version} of the weights"
        if found is None or not self._is_begun(found, part.key):
            raise WeightsMissing(f"{name} was retired while rank {part.key.rank} published it")
        if found.failure is not None:
            raise WeightsMissing(f"{name} can't be published, {found.failure}")
        if found.is_retiring:
            raise WeightsMissing(f"{name} is being retired")
        found.parts[part.key.rank] = part
        if found.is_complete:
            self._last = found.number, found.publisher, now
            if self.newest_lost is not None and found.number >= self.newest_lost[0]:
                self.newest_lost = None

    def fail(self, key: PartKey, reason: str) -> Version | None:
        """A rank can't publish its part, so that its version never gets complete: which that is.

        None where that is no news, or the part is there, and only the answer to the rank was lost.
        """
        found = self._versions.get(key.version)
        if found is None or found.failure is not None or not self._is_begun(found, key):
            return None
        if key.rank in found.parts:
            return None
        found.failure = f"the push of {found.publisher}'s rank {key.rank} failed: {reason}"
        found.parts.clear()
        return found

    @staticmethod
    def _is_begun(found: Version, key: PartKey) -> bool:
        return found.begun.get(key.rank, (None,))[0] == key

    # --- reading ---

    def find(self, version: int) -> Version | None:
        """A complete version; None where it may still come. Raises WeightsMissing where it won't."""
        found = self._versions.get(version)
        name = f"version {version} of the weights"
        if found is None:
            if version in self._gone:
                raise WeightsMissing(f"{name} {self._gone[version]}")
            return None
        if found.failure is not None:
            raise WeightsMissing(f"{name} is not to be had, {found.failure}")
        if found.is_complete and found.is_retiring:
            raise WeightsMissing(f"{name} is being retired")
        return found if found.is_complete else None

    def missing(self, version: int, timeout_s: float, now: float) -> str:
        """Who should have pushed a version that has not come."""
        start = f"version {version} of the weights isn't in the store after {timeout_s:g} s: "
        found = self._versions.get(version)
        if found is None:
            who = self._last[1] if self._last else "the trainer"
            return f"{start}no rank of {who} has begun to publish it ({self._last_words(now)})"
        absent = [rank for rank in range(found.world_size) if rank not in found.parts]
        ranks = ", ".join(f"{rank}{self._state(found, rank)}" for rank in absent)
        return (
            f"{start}of {found.publisher}'s {found.world_size} ranks these have not published their part: "
            f"{ranks} ({self._last_words(now)})"
        )

    def _last_words(self, now: float) -> str:
        if self._last is None:
            return "nothing was ever published"
        there = ", ".join(map(str, self.complete())) or "none"
        return (
            f"complete versions: {there}; the last was {self._last[0]}, "
            f"published {now - self._last[2]:.0f} s ago"
        )

    @staticmethod
    def _state(found: Version, rank: int) -> str:
        if rank not in found.begun:
            return ""
        _, writer = found.begun[rank]
        return f" (its process {writer.pid} is gone)" if writer.is_gone() else f" (process {writer.pid})"

    def hold(self, version: Version, reader: Reader, now: float) -> None:
        """Keeps a version from being retired."""
        version.holds[reader] = now

    def renew(self, version: int, reader: Reader, now: float) -> None:
        """A reader on another host says that it is alive; one whose hold is lost hears of it at its end."""
        found = self._versions.get(version)
        if found is not None and reader in found.holds:
            found.holds[reader] = now

    def let_go(self, version: int, reader: Reader) -> str | None:
        """None when the reader had its hold to the end, else what has become of the version."""
        found = self._versions.get(version)
        if found is not None and found.holds.pop(reader, None) is not None:
            return None
        why = self._gone.get(version, _RETIRED)
        return f"version {version} of the weights {'was retired meanwhile' if why == _RETIRED else why}"

    def readers(self, found: Version, now: float) -> list[Reader]:
        """Those that hold a version; none where it is lost. Those that are dead lose their hold."""
        if not self.has(found):
            return []
        holds = found.holds
        for reader, heard in list(holds.items()):
            if reader.process.is_gone() or (not reader.process.is_near and now - heard > HOLD_S):
                del holds[reader]
        return list(holds)

    # --- ending ---

    def start_retiring(self, version: int) -> Version | None:
        """Lets no new reader in. None where there is nothing of it."""
        found = self._versions.get(version)
        if found is not None:
            found.is_retiring = True
        return found

    def has(self, found: Version) -> bool:
        """False where it was lost, even if the same number is pushed again."""
        return self._versions.get(found.number) is found

    def end(self, found: Version) -> None:
        """Its data is deleted; it may be published again."""
        if not self.has(found):
            return
        del self._versions[found.number]
        if found.is_complete:
            self._note(found.number, _RETIRED)

    def lose(self, volume: str, reason: str) -> list[Version]:
        """A volume is gone. Returns the versions that went with it, of which other volumes may hold parts."""
        lost = [found for found in self._versions.values() if volume in found.volumes]
        for found in lost:
            version = found.number
            if found.is_complete:
                del self._versions[version]
                self._note(version, f"is lost: {reason}")
                if not found.is_retiring:
                    self.newest_lost = max(self.newest_lost or (version, reason), (version, reason))
            else:
                found.failure = f"a part of it was lost: {reason}"
                found.parts.clear()
        return lost

    def _note(self, version: int, why: str) -> None:
        self._gone[version] = why
        for old in list(itertools.islice(self._gone, max(0, len(self._gone) - _NUM_NOTES))):
            del self._gone[old]

    # --- lists ---

    def complete(self) -> list[int]:
        """Versions that readers can have, ascending."""
        return sorted(v for v, found in self._versions.items() if found.is_complete and not found.is_retiring)

    def unfinished(self) -> list[int]:
        """Versions of which something is there, or was begun, but that readers can't have, ascending."""
        return sorted(self._versions.keys() - set(self.complete()))
