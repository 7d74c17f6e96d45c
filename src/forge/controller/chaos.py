"""Chaos: kills processes of a run at random, to see that it does not matter."""

import asyncio
import logging
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge.controller.replica import ReplicaState, ReplicaStatus
from forge.controller.supervisor import Supervisor
from forge.errors import ConfigError

logger = logging.getLogger(__name__)
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL, and how long its replica was away; None while it is not back."""

    service: str
    replica: int
    rank: int
    back_after_s: float | None


class Chaos:
    """Kills one process of a random replica every `every_s` seconds on average.

    targets: names of services and actors, "all" for any. The same seed kills in the same order.
    """

    def __init__(
        self,
        services: Mapping[str, Supervisor],
        targets: Sequence[str],
        *,
        every_s: float,
        seed: int = 0,
        max_kills: int | None = None,
    ) -> None:
        names = sorted({service.options.name for service in services.values()})
        unknown = sorted(set(targets) - set(names) - {"all"})
        if unknown:
            raise ConfigError(f"chaos.kill names {', '.join(unknown)}; there are {', '.join(names)}, or all")
        self.kills: list[Kill] = []
        self._services = services
        self._targets = set(names if "all" in targets else targets)
        self._every_s = every_s
        self._max_kills = max_kills
        self._dice = random.Random(seed)

    async def run(self) -> None:
        """Kills until it is cancelled, or has killed `max_kills` times. One at a time: the next kill comes
        after the last replica is back."""
        while self._max_kills is None or len(self.kills) < self._max_kills:
            await asyncio.sleep(self._dice.uniform(0.5, 1.5) * self._every_s)
            await self._kill_one()

    def summary(self) -> str:
        """What was killed, and what it cost."""
        if not self.kills:
            return "chaos: nothing was killed"
        counts = Counter(kill.service for kill in self.kills)
        killed = ", ".join(f"{name} {num}x" for name, num in sorted(counts.items()))
        away = [kill.back_after_s for kill in self.kills if kill.back_after_s is not None]
        cost = (
            f"back after {statistics.median(away):.1f} s (median), {max(away):.1f} s at most" if away else ""
        )
        missing = len(self.kills) - len(away)
        return f"chaos: killed {killed}; {cost}" + (f"; {missing} not back" if missing else "")

    async def _kill_one(self) -> None:
        services = [s for s in self._services.values() if s.options.name in self._targets]
        if not services:
            return
        service = self._dice.choice(services)
        healthy = [r for r in await service.replicas() if r.state is ReplicaState.HEALTHY and r.pids]
        if not healthy:
            return
        victim = self._dice.choice(healthy)
        rank = self._dice.randrange(len(victim.pids))
        try:
            os.kill(victim.pids[rank], signal.SIGKILL)
        except ProcessLookupError:  # it has just died by itself
            return
        logger.warning("chaos: killed %s[%d], rank %d", service.options.name, victim.index, rank)
        started = time.monotonic()
        place = len(self.kills)
        self.kills.append(Kill(service.options.name, victim.index, rank, None))
        while not _is_back(service, victim):
            if not _is_coming(service, victim):
                return
            await asyncio.sleep(_LOOK_S)
        self.kills[place] = Kill(service.options.name, victim.index, rank, time.monotonic() - started)


def _is_coming(service: Supervisor, victim: ReplicaStatus) -> bool:
    """Whether it may still come back: single actors that don't recover their state never do."""
    states = {r.index: r.state for r in service.statuses()}
    return service.heals and states.get(victim.index, ReplicaState.FAILED) is not ReplicaState.FAILED


def _is_back(service: Supervisor, victim: ReplicaStatus) -> bool:
    return any(
        r.index == victim.index and r.restarts > victim.restarts and r.state is ReplicaState.HEALTHY
        for r in service.statuses()
    )
