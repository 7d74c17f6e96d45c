"""Provisioner: starts processes on the hosts that have room, and notices when a host is gone."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from forge.controller._monarch import HostMesh, ProcMesh
from forge.controller.bootstrap import bootstrap
from forge.controller.launcher import Launcher, attach
from forge.controller.ledger import Demand, Host, Ledger, Place
from forge.controller.machine import free_port
from forge.errors import ConfigError, ForgeError, NotEnoughGPUs, ReplicaLost

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_S = 0.25
_NAME_VARIABLE = "HYPERACTOR_PROCESS_NAME"  # "NAME-RANK @ HOST"
_ARRIVAL_S = 60.0  # Monarch waits forever for processes on a host that is gone


@dataclass(slots=True)
class Placement:
    """The processes of one mesh."""

    name: str  # unique
    procs: ProcMesh
    place: Place

    def spawn(self, *args: Any) -> Any:
        """A Monarch actor in each, in one row over all hosts."""
        actors = self.procs.spawn(*args)
        return actors.flatten("procs") if self.place.hosts[0].worker is not None else actors


class Provisioner:
    """The hosts of a run with what they have; every mesh of processes comes from here and goes back here."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._ledger = Ledger(launcher.plan())
        self._set_aside: list[Host] = []
        self._is_open = False
        self._opening = asyncio.Lock()
        self._replacements: dict[str, asyncio.Task[None]] = {}  # by name of the host that is gone
        self._num_moving: Counter[str] = Counter()  # replicas of each service that look for another place
        self._changed = asyncio.Event()  # of who holds what; each change has its own

    async def open(self, folder: Path) -> None:
        """Starts the hosts; a second time does nothing. `folder` lives as long as the run."""
        async with self._opening:
            if not self._is_open:
                await self._launcher.start([*self._ledger.hosts, *self._set_aside], folder)
                self._is_open = True

    async def set_aside(self, num_hosts: int, folder: Path) -> list[HostMesh]:
        """Keeps the last hosts for something else than actors; to be asked before any has a place.

        Starts all hosts. ConfigError when no other is left.
        """
        hosts = self._ledger.hosts
        if num_hosts >= len(hosts):
            raise ConfigError(
                f"{num_hosts} of {len(hosts)} hosts can't be set aside: actors need at least one; "
                f"raise launcher.num_hosts to {num_hosts + 1}"
            )
        self._set_aside, hosts[-num_hosts:] = hosts[-num_hosts:], []
        await self.open(folder)
        return [_mesh_over(host.name, [host]) for host in self._set_aside]

    async def close(self) -> None:
        """Ends the hosts. What ran on them was released before."""
        for replacement in self._replacements.values():
            replacement.cancel()
        await asyncio.gather(*self._replacements.values(), return_exceptions=True)
        await self._launcher.stop()

    def check(self, demands: Sequence[Demand]) -> None:
        """Keeps a place for every replica of a run; NotEnoughGPUs, with the arithmetic, if one finds none."""
        self._ledger.plan(demands)

    def reserve(self, demand: Demand, num_replicas: int) -> list[Place]:
        """Places for so many replicas of a service; NotEnoughGPUs when they are not there."""
        self._look()
        return self._ledger.reserve(demand, num_replicas)

    def give_back(self, place: Place) -> None:
        """Frees a place; a second time does nothing."""
        self._ledger.give_back(place)
        self._tell()

    async def move(self, demand: Demand, place: Place, *, is_suspect: bool) -> Place:
        """Where a lost replica starts again: another place when its host is gone, or on spare GPUs when its
        own are suspect, but not from GPUs that are shared; else the same. NotEnoughGPUs when no host that is
        left has room."""
        self._look()
        if place.is_gone:
            self.give_back(place)
            return await self._find(demand)
        if not (is_suspect and place.gpus) or self._ledger.is_shared(place):
            return place
        try:
            [spare] = self._ledger.reserve(demand, 1)
        except NotEnoughGPUs:
            return place
        self.give_back(place)
        return spare

    def spawn(self, name: str, place: Place, *, compute_bound: bool, env: dict[str, str]) -> Placement:
        """Starts the processes of a place, one GPU each where it has any. No other placement has their name,
        nor one of a program that this one has started."""
        name = f"{name}_of_{os.getpid()}"
        first, num_procs = place.hosts[0], place.procs * len(place.hosts)
        own = {
            "WORLD_SIZE": str(num_procs),
            "LOCAL_WORLD_SIZE": str(place.procs),
            "MASTER_ADDR": first.ip,
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": str(place.num_threads(compute_bound=compute_bound)),
            # two pools that spin on the same cores slow each other down many times over
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            **env,
        }
        start = functools.partial(bootstrap, own, place.gpus, place.procs)
        procs = _mesh_over(name, place.hosts).spawn_procs({"procs": place.procs}, bootstrap=start, name=name)
        return Placement(name, procs, place)

    async def arrival(self, placement: Placement, work: Coroutine[Any, Any, T]) -> T:
        """The outcome of `work`, the first call to new processes; ReplicaLost when their host is gone."""
        hosts = [host for host in placement.place.hosts if host.worker is not None]
        task = asyncio.ensure_future(work)
        deadline = asyncio.get_running_loop().time() + _ARRIVAL_S
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_S))[0]:
                self._look()
                if len(hosts) == 1 and asyncio.get_running_loop().time() > deadline:
                    self._lose(hosts[0], f"no process had started there after {_ARRIVAL_S:g} s")
                for host in hosts:
                    if host.is_gone:
                        raise ReplicaLost(f"{host.name} is gone: nothing starts there any more")
            return task.result()
        finally:
            task.cancel()

    async def release(self, placement: Placement, pids: list[int], *, kill: bool = False) -> None:
        """Stops the processes; kills those that don't stop by themselves, or all at once with `kill`.

        pids: empty when they have not answered. Monarch forgets one that takes too long to, as on a busy
        machine, though it still starts: those are found by their name.
        """

        def end() -> None:
            if not pids:
                end_processes(started_for(placement.name))
            elif all(host.is_this_machine for host in placement.place.hosts):
                end_processes(pids)

        if kill:
            end()
        try:
            await asyncio.wait_for(_stop(placement.procs), timeout=5)
        except Exception as error:  # too slow, or it never started: killed below in any case
            logger.debug("%s did not stop: %s: %s", placement.name, type(error).__name__, error)
        finally:
            end()

    async def _find(self, demand: Demand) -> Place:
        """A place on the hosts that are left, or on those that are about to take the place of lost ones; on
        the GPUs of a service that moves, too, once it has moved."""
        self._num_moving[demand.name] += 1
        try:
            while True:
                changed = self._changed
                try:
                    return self._ledger.reserve(demand, 1)[0]
                except ConfigError:
                    if not self._has_more_to_come(demand):
                        raise
                await changed.wait()
        finally:
            self._num_moving[demand.name] -= 1
            self._tell()

    def _has_more_to_come(self, demand: Demand) -> bool:
        """Whether a place that is not there yet may come, of what has been lost so far."""
        base = demand.shares_gpus_with
        if base is not None and (self._num_moving[base] or self._ledger.is_to_move(base)):
            return True
        return any(not task.done() for task in self._replacements.values())

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _look(self) -> None:
        """Takes hosts that have ended out of the ledger."""
        for host in self._ledger.alive if self._is_open else []:
            if self._launcher.is_gone(host):
                self._lose(host, "it has ended")

    def _lose(self, host: Host, reason: str) -> None:
        host.is_gone = True
        logger.warning("%s is gone (%s)", host.name, reason)
        if not host.is_replacement:  # one that goes too is not worth a third
            self._replacements[host.name] = task = asyncio.ensure_future(self._replace(host))
            task.add_done_callback(lambda _: self._tell())

    async def _replace(self, lost: Host) -> None:
        try:
            new = await self._launcher.replace(lost)
        except ForgeError as error:
            logger.warning("%s could not be replaced: %s", lost.name, error)
            return
        if new is not None:
            new.is_replacement = True
            self._ledger.hosts.append(new)
            logger.warning("%s takes the place of %s", new.name, lost.name)


def _mesh_over(name: str, hosts: list[Host]) -> HostMesh:
    if len(hosts) > 1:
        return attach(name, hosts)
    assert hosts[0].mesh is not None, f"{hosts[0].name} was not started"
    return hosts[0].mesh


async def _stop(procs: ProcMesh) -> None:
    await procs.stop()


def end_processes(pids: Iterable[int]) -> None:
    """Kills those that still run."""
    for pid in pids:
        if is_running(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def started_for(placement: str) -> set[int]:
    """Pids of the processes that Monarch has started for a placement below this one, whether they have
    answered or not. It tells each its name by its environment."""
    pids = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            name, _, rank = child.environ().get(_NAME_VARIABLE, "").partition(" @ ")[0].rpartition("-")
            if name == placement and rank.isdecimal():
                pids.add(child.pid)
    return pids


def is_running(pid: int) -> bool:
    """Whether a process of ours still runs; one that has ended but was not reaped does not count."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
