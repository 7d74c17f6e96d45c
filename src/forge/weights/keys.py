"""PartKey: what one rank's part of one version is called in TorchStore."""

from dataclasses import dataclass

PREFIX = "policy"


@dataclass(frozen=True, slots=True)
class PartKey:
    """No key is ever written twice: TorchStore hands out a mixture of old and new while one is overwritten.

    Hence `attempt`, which differs whenever a version is pushed again.
    """

    version: int
    rank: int
    world_size: int
    attempt: int

    @property
    def prefix(self) -> str:
        """Begins all keys of this part."""
        return f"{PREFIX}.v{self.version}.rank{self.rank}of{self.world_size}.attempt{self.attempt}"

    def arena(self, chunk: int) -> str:
        """Holds one chunk of the bytes."""
        return f"{self.prefix}.arena.{chunk}"
