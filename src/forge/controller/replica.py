"""Replica: one place in a service, through all the processes that take it one after the other."""

import asyncio
import time
from dataclasses import dataclass
from enum import Enum

from forge.controller.host import Pulse
from forge.controller.lane import Member
from forge.controller.ledger import Place
from forge.controller.mesh import Mesh

SETTLED_S = 30.0  # one that lived so long did not die of its start
MAX_FAILURES = 5  # deaths in a row without a single answer in between
_LONGEST_BACKOFF_S = 30.0


class ReplicaState(Enum):
    """LOADING -> SYNCED -> HEALTHY -> LOST -> LOADING ...; only a HEALTHY one takes calls."""

    LOADING = "loading"  # its processes start
    SYNCED = "synced"  # it has caught up once, and is checked for what it missed meanwhile
    HEALTHY = "healthy"
    DRAINING = "draining"  # finishes what it runs, then goes
    LOST = "lost"  # its process is gone; a new one will be started
    FAILED = "failed"  # died too often in a row; given up


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What `replicas()` shows of each."""

    index: int
    state: ReplicaState
    version: int | None  # of the weights that it works with; None where there are none
    load: int  # calls in progress, whoever made them
    restarts: int
    pids: tuple[int, ...]
    hosts: tuple[str, ...]
    gpus: tuple[str, ...]
    reason: str | None  # why it was lost last


class Replica:
    """Its state, and the mesh that plays it at present."""

    def __init__(self, index: int, place: Place) -> None:
        self.index = index
        self.place = place
        self.state = ReplicaState.LOADING
        self.mesh: Mesh | None = None
        self.generation = 0
        self.failures = 0  # starts and lives in a row that ended before one call was answered
        self.reason: str | None = None
        self.pulse = Pulse(0, 0, 0)
        self.healing: asyncio.Task[None] | None = None  # brings the next process, while one is lost
        self._healthy_since = 0.0

    @property
    def member(self) -> Member:
        """What callers need to reach it."""
        assert self.mesh is not None
        return Member(self.index, self.generation, self.mesh.hosts, len(self.mesh.pids), self.mesh.pids[0])

    def become_healthy(self) -> None:
        """It takes calls from now on."""
        self.state = ReplicaState.HEALTHY
        self.pulse = Pulse(0, 0, 0)
        self._healthy_since = time.monotonic()

    def count_loss(self, *, num_answered: int, num_running: int) -> None:
        """It died: of its own accord, when it has neither answered a call nor lived for long. Where it ran
        calls, one of them may have killed it: they have limits of their own."""
        lived = time.monotonic() - self._healthy_since
        if lived > SETTLED_S or num_answered > 0 or self.pulse.num_done > 0:
            self.failures = 0
        elif num_running == 0:
            self.failures += 1

    def backoff_s(self) -> float:
        """How long to wait before the next start: nothing after the first death, then ever longer."""
        return 0.0 if self.failures < 2 else min(0.5 * 2.0 ** (self.failures - 2), _LONGEST_BACKOFF_S)

    def status(self) -> ReplicaStatus:
        """As it is now."""
        pids = tuple(self.mesh.pids) if self.mesh is not None else ()
        return ReplicaStatus(
            self.index,
            self.state,
            self.pulse.version,
            self.pulse.num_running,
            self.generation,
            pids,
            tuple(host.name for host in self.place.hosts),
            tuple(self.place.gpus),
            self.reason,
        )
