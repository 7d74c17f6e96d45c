"""Finding: an invariant that does not hold, and of which episodes."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """Reads as one line: `invariant`: `rule`, but `seen`: `fix`."""

    invariant: str  # a field of CheckOptions
    episode_ids: tuple[str, ...]  # that break it, the worst first
    rule: str
    seen: str  # the value, and where
    fix: str

    def __str__(self) -> str:
        return f"check {self.invariant}: {self.rule}, but {self.seen}: {self.fix}"


def name_all(episode_ids: Sequence[str]) -> str:
    """ "episode 3/0", "episodes 3/0, 3/1 and 6 more"."""
    if not episode_ids:
        return "an episode without a name"
    more = f" and {len(episode_ids) - MAX_NAMED} more" if len(episode_ids) > MAX_NAMED else ""
    return f"episode{'s' * (len(episode_ids) > 1)} {', '.join(episode_ids[:MAX_NAMED])}{more}"
