"""PartKey: what one rank's part of one version is called in TorchStore."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

PREFIX = "policy"
_INDEX = re.compile(rf"{PREFIX}\.v(\d+)\.rank(\d+)of(\d+)\.index")
_OF_VERSION = re.compile(rf"{PREFIX}\.v(\d+)\.")


@dataclass(frozen=True, slots=True)
class PartKey:
    """Keys are dot-separated because TorchStore lists keys by whole dot-separated components.

    No key is ever written twice: TorchStore hands out a mixture of old and new while a key is overwritten.
    """

    version: int
    rank: int
    world_size: int

    @property
    def index(self) -> str:
        """Holds the Part; written last, so that it stands for "this rank has published"."""
        return f"{version_prefix(self.version)}.rank{self.rank}of{self.world_size}.index"

    def arena(self, chunk: int) -> str:
        """Holds one chunk of the bytes."""
        return f"{version_prefix(self.version)}.rank{self.rank}of{self.world_size}.arena.{chunk}"


def version_prefix(version: int) -> str:
    return f"{PREFIX}.v{version}"


def published_parts(keys: Iterable[str]) -> dict[int, list[PartKey]]:
    """The parts that are in the store, by version, ascending; each list in order of the rank."""
    found: dict[int, list[PartKey]] = defaultdict(list)
    for key in keys:
        if match := _INDEX.fullmatch(key):
            version, rank, world_size = map(int, match.groups())
            found[version].append(PartKey(version, rank, world_size))
    return {v: sorted(found[v], key=lambda key: (key.world_size, key.rank)) for v in sorted(found)}


def stored_versions(keys: Iterable[str]) -> set[int]:
    """Every version that any key belongs to."""
    return {int(match[1]) for key in keys if (match := _OF_VERSION.match(key))}


def missing_ranks(parts: list[PartKey]) -> list[int]:
    """Ranks of the publishing mesh whose part isn't there; all parts of a version come from one mesh."""
    world_size = parts[0].world_size
    return sorted(set(range(world_size)) - {key.rank for key in parts})
