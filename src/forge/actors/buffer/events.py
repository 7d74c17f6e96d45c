"""[4] The events of a replay buffer's life, as they stand in its journal.

`call` is the id of the call that caused the event; one that is repeated has no second effect.
"""

from dataclasses import dataclass
from typing import Any

from forge.data_models import Episode


@dataclass(frozen=True, slots=True)
class Admitted:
    """A rollout of so many episodes was let in by a call, and given the number of its question."""

    call: str | None
    num_episodes: int
    version: int  # that generates then: what it brings is not older


@dataclass(frozen=True, slots=True)
class Restarted:
    """A rollout that was let in goes on to the next question: what it generated is of no use."""

    call: str | None
    number: int  # of the question that it gives up
    version: int  # that generates then


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
class Generating:
    """The generators, all of them, hold a version, or a newer one."""

    version: int


@dataclass(frozen=True, slots=True)
class Bounded:
    """From now on rollouts are let in so that they may get so old, and no older."""

    call: str | None
    max_policy_age: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """A call took a batch of so many episodes."""

    call: str | None
    num_episodes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """All is as a state says that was taken before, perhaps of another run (`EpisodeQueue.state`)."""

    call: str | None
    state: dict[str, Any]


Event = Admitted | Restarted | Added | Advanced | Generating | Bounded | Sampled | Loaded
