"""Launchers: how the hosts of a run come to be."""

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal, Protocol

from forge.controller._monarch import HostMesh, attach_to_workers, this_host
from forge.controller.ledger import Host
from forge.controller.machine import num_cores, visible_gpus
from forge.errors import ActorFailure, ConfigError

logger = logging.getLogger(__name__)

_serial = itertools.count()  # Monarch remembers addresses of hosts that are gone: none is used twice
_START_S = 60.0
_SHUTDOWN_S = 5.0  # a host that is gone never answers
_EXIT_S = 2.0


class Launcher(Protocol):
    """Makes hosts, says which are gone, and ends them; a cluster's scheduler fits behind this too."""

    def plan(self) -> list[Host]:
        """The hosts as they will be. None is started: a dry run asks as well."""
        ...

    async def start(self, hosts: list[Host], folder: Path) -> None:
        """Starts planned hosts, and gives each its Monarch mesh. `folder` lives as long as the run."""
        ...

    def is_gone(self, host: Host) -> bool:
        """Whether a started host is known to have ended."""
        ...

    async def replace(self, host: Host) -> Host | None:
        """Ends a lost host for good, and starts another in its place; None where that can't be done."""
        ...

    async def stop(self) -> None:
        """Ends all hosts. Actors on them were stopped before."""
        ...


def make_launcher(name: Literal["this_host", "local"], num_hosts: int, gpus_per_host: int | None) -> Launcher:
    """The launcher that a configuration names."""
    return LocalHosts(num_hosts, gpus_per_host) if name == "local" else ThisHost()


class ThisHost:
    """The host that the root process is on, with all its visible GPUs; it is gone when the root is."""

    def plan(self) -> list[Host]:
        """This host."""
        return [Host("this host", visible_gpus(), num_cores())]

    async def start(self, hosts: list[Host], folder: Path) -> None:
        """It runs already."""
        for host in hosts:
            host.mesh = this_host()

    def is_gone(self, host: Host) -> bool:
        """Not while anyone can ask."""
        return False

    async def replace(self, host: Host) -> Host | None:
        """There is no other."""
        return None

    async def stop(self) -> None:
        """Ends with the root process."""


class LocalHosts:
    """Several emulated hosts on this machine: one process each, which can be lost and replaced alone.

    For tests, and to try out on one machine what is meant for several. The machine's cores are divided among
    them, and so are its GPUs, unless `gpus_per_host` says how many each pretends to have ("0", "1", ...).
    """

    def __init__(self, num_hosts: int, gpus_per_host: int | None = None) -> None:
        if num_hosts < 1:
            raise ConfigError(f"num_hosts must be at least 1, got {num_hosts}")
        self._num_hosts = num_hosts
        self._gpus_per_host = gpus_per_host
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # by the host's name
        self._meshes: dict[str, HostMesh] = {}
        self._folder: Path | None = None

    def plan(self) -> list[Host]:
        """host0, host1, ..."""
        cores = max(1, num_cores() // self._num_hosts)
        return [Host(f"host{i}", self._gpus(i), cores) for i in range(self._num_hosts)]

    async def start(self, hosts: list[Host], folder: Path) -> None:
        """One process for each."""
        self._folder = folder
        atexit.register(self._kill_all)
        try:
            await asyncio.gather(*(self._start(host) for host in hosts))
        except BaseException:
            self._kill_all()
            raise

    def is_gone(self, host: Host) -> bool:
        """Whether its process has ended."""
        process = self._processes.get(host.name)
        return process is None or process.poll() is not None

    async def replace(self, host: Host) -> Host | None:
        """A new process with the same GPUs."""
        self._kill(host.name)
        new = Host(f"{host.name}'", list(host.gpus), host.num_cores)
        await self._start(new)
        return new

    async def stop(self) -> None:
        """Lets Monarch end each; kills what is left."""
        await asyncio.gather(*(self._shut_down(name) for name in list(self._processes)))
        atexit.unregister(self._kill_all)

    def _gpus(self, index: int) -> list[str]:
        if self._gpus_per_host is not None:
            return [str(i) for i in range(self._gpus_per_host)]
        gpus = visible_gpus()
        share = len(gpus) // self._num_hosts
        return gpus[index * share : (index + 1) * share]

    async def _start(self, host: Host) -> None:
        assert self._folder is not None, "start comes first"
        host.worker = f"ipc://{self._folder}/host{next(_serial)}"
        self._processes[host.name] = subprocess.Popen(
            [sys.executable, "-m", "forge.controller.host_process", host.worker, str(os.getpid())],
            # what the root can import must be importable there
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # all of a host can be killed by its session; Ctrl-C is for the root
        )
        host.mesh = self._meshes[host.name] = attach(host.name, [host])
        try:
            await asyncio.wait_for(_initialized(host.mesh), _START_S)
        except TimeoutError:
            self._kill(host.name)
            raise ActorFailure(f"{host.name} had not started after {_START_S:g} s") from None
        logger.info("%s started: process %d", host.name, self._processes[host.name].pid)

    async def _shut_down(self, name: str) -> None:
        """A host that was shut down leaves nothing that Monarch would wait for at the end of this process."""
        process = self._processes[name]
        if process.poll() is None:
            with contextlib.suppress(TimeoutError, RuntimeError):  # it may end at any moment
                await asyncio.wait_for(_shutdown(self._meshes[name]), _SHUTDOWN_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _EXIT_S)
        self._kill(name)

    def _kill(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            kill_session(process.pid)
            process.wait()

    def _kill_all(self) -> None:
        for name in list(self._processes):
            self._kill(name)


def attach(name: str, hosts: list[Host]) -> HostMesh:
    """One Monarch mesh over hosts that run already."""
    workers = [host.worker for host in hosts]
    if None in workers:
        raise ConfigError(f"{name} wants {len(hosts)} hosts, and this launcher's can't be joined")
    return attach_to_workers(ca="trust_all_connections", workers=workers, name=name)  # type: ignore[arg-type]


def kill_session(leader: int) -> None:
    """Kills every process of a session, also those whose parents are gone."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry)) == leader:
                    os.kill(int(entry), signal.SIGKILL)


async def _initialized(mesh: HostMesh) -> None:
    await mesh.initialized


async def _shutdown(mesh: HostMesh) -> None:
    await mesh.shutdown()
