"""Volumes: the processes that hold published weights, started by the root process, ended with it."""

import asyncio
import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from forge.errors import ForgeError, WeightsMissing
from forge.weights._torchstore import (
    HostMesh,
    InMemoryStore,
    ProcMesh,
    StorageVolume,
    SupervisionError,
    endpoint,
    this_host,
)
from forge.weights.process import Process
from forge.weights.transport import HOST_VARIABLE, host_identity

logger = logging.getLogger(__name__)

_ACTOR = "weights_volume"
_START_S = 120.0
_STOP_S = 10.0
_ANSWER_S = 600.0  # to delete keys, behind what the volume is doing: a put by RDMA may take that long
_PROBE_S = 10.0  # the same of one that somebody has given up already
_serial = itertools.count()  # Monarch remembers names of what is gone: none is used twice


def volume_host(volume: str) -> str:
    """The host_identity of a volume's process, which its id begins with."""
    return volume.rpartition("#")[0]


class Volume(StorageVolume):
    """TorchStore's volume, which can also forget many keys at once."""

    @endpoint
    async def host(self) -> str:
        return host_identity()

    @endpoint
    async def drop(self, prefixes: tuple[str, ...]) -> None:
        """Deletes every key that begins with the dot-separated components of one of these."""
        assert isinstance(self.store, InMemoryStore)
        starts = tuple(f"{prefix}." for prefix in prefixes)
        for key in [key for key in self.store.kv if key.startswith(starts)]:
            del self.store.kv[key]


@dataclass(frozen=True, slots=True)
class _Running:
    procs: ProcMesh
    actor: Volume
    host: str  # host_identity of its process


class Volumes:
    """By default one on each host that a publisher runs on, started when it is first needed.

    With dedicated hosts one on each of those; a publisher takes the one of its own host if there is one.
    Lives in an actor of the root process, so that Monarch tells that actor when one dies.
    """

    def __init__(self, dedicated: Sequence[HostMesh] | None) -> None:
        self._dedicated = dedicated
        self._on_dedicated: dict[int, str] = {}  # id by the host's index
        self._tasks: dict[str, asyncio.Task[_Running]] = {}  # by id: starting, or started
        self._lost: dict[str, str] = {}  # why
        self._filling = asyncio.Lock()

    async def open(self) -> None:
        """Starts those on dedicated hosts."""
        if self._dedicated is not None:
            await self._fill(self._dedicated)

    async def choose(self, publisher: Process, rank: int, here: HostMesh, host_name: str | None) -> str:
        """The id of the volume that a publisher's rank stores in; it may still be starting.

        here: the publisher's host. host_name: what its processes call it, see `host_identity`.
        """
        if self._dedicated is not None:
            await self._fill(self._dedicated)
        near = [volume for volume in self._tasks if volume_host(volume) == publisher.host]
        if self._dedicated is not None:
            able = near or sorted(self._tasks)
            return able[rank % len(able)]
        if near:
            return near[0]
        # beside the root on the root's own handle: an emulated host may be lost while the root lives
        host = this_host() if publisher.is_near else here
        number = next(_serial)
        volume = f"{publisher.host}#{number}"
        self._tasks[volume] = asyncio.create_task(_start(number, host, host_name))
        return volume

    async def _fill(self, hosts: Sequence[HostMesh]) -> None:
        async with self._filling:
            empty = [i for i in range(len(hosts)) if self._on_dedicated.get(i) not in self._tasks]
            numbers = [next(_serial) for _ in empty]
            tasks = [
                asyncio.create_task(_start(n, hosts[i], None)) for i, n in zip(empty, numbers, strict=True)
            ]
            if tasks:
                await asyncio.wait(tasks)
            for i, number, task in zip(empty, numbers, tasks, strict=True):
                try:
                    self._on_dedicated[i] = volume = f"{(await task).host}#{number}"
                except (RuntimeError, TimeoutError) as error:  # the host may be lost
                    logger.warning("dedicated host %d can have no volume of the weights: %r", i, error)
                else:
                    self._tasks[volume] = task
            if not self._tasks:
                raise ForgeError("no volume of the weights can be started on any of their dedicated hosts")

    async def actor(self, volume: str) -> Volume:
        """Waits until it has started. Raises WeightsMissing for one that is gone."""
        task = self._tasks.get(volume)
        if task is None:
            raise WeightsMissing(
                f"{volume_name(volume)} is gone: {self._lost.get(volume, 'the store closed')}"
            )
        await asyncio.wait([task])
        if task.cancelled():
            raise WeightsMissing(f"{volume_name(volume)} was ended while it started")
        if (error := task.exception()) is not None:
            self._tasks.pop(volume, None)  # the next to choose may have more luck
            raise ForgeError(f"{volume_name(volume)} can't be started: {error!r}")
        return task.result().actor

    def is_there(self, volume: str) -> bool:
        return volume in self._tasks

    def find(self, mesh_name: str) -> str | None:
        """The volume whose actor Monarch calls so."""
        ids = {f"{_ACTOR}{volume.rpartition('#')[2]}": volume for volume in self._tasks}
        return ids.get(mesh_name.split("-")[0])

    async def forget(self, volume: str, reason: str) -> None:
        """It has died. Another takes its place when one is chosen again."""
        task = self._tasks.pop(volume, None)
        if task is not None:
            self._lost[volume] = reason
            await _stop(task)

    async def answers(self, volume: str) -> bool:
        """Whether it is there and alive, or still starting."""
        task = self._tasks.get(volume)
        if task is None or not task.done():
            return task is not None
        if task.cancelled() or task.exception() is not None:
            return False
        try:
            await asyncio.wait_for(_host_of(task.result().actor), _PROBE_S)
        except (TimeoutError, SupervisionError):
            return False
        return True

    async def drop(self, prefixes: tuple[str, ...]) -> dict[str, Exception]:
        """Deletes all keys with these prefixes; returns the volumes that don't answer."""
        started = {v: t.result() for v, t in self._tasks.items() if t.done() and t.exception() is None}
        results = await asyncio.gather(
            *(asyncio.wait_for(_drop(running, prefixes), _ANSWER_S) for running in started.values()),
            return_exceptions=True,
        )
        return {v: r for v, r in zip(started, results, strict=True) if isinstance(r, Exception)}

    async def close(self) -> None:
        """Ends all processes."""
        tasks, self._tasks = list(self._tasks.values()), {}
        await asyncio.gather(*(_stop(task) for task in tasks))


def volume_name(volume: str) -> str:
    """How messages call it."""
    return f"the volume of the weights on {volume_host(volume).split('/')[0]}"


async def _start(number: int, host: HostMesh, host_name: str | None) -> _Running:
    bootstrap = partial(_name_host, host_name) if host_name is not None else None
    procs = host.spawn_procs({"procs": 1}, bootstrap=bootstrap, name="weights")
    try:
        actor = procs.spawn(f"{_ACTOR}{number}", Volume, id_func=partial(str, number))
        return _Running(procs, actor, await asyncio.wait_for(_host_of(actor), _START_S))
    except BaseException:
        await _end(procs)
        raise


def _name_host(host_name: str) -> None:
    os.environ[HOST_VARIABLE] = host_name


async def _host_of(actor: Volume) -> str:
    return await actor.host.call_one()


async def _drop(running: _Running, prefixes: tuple[str, ...]) -> None:
    await running.actor.drop.call_one(prefixes)


async def _stop(task: asyncio.Task[_Running]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and task.exception() is None:
        await _end(task.result().procs)


async def _end(procs: ProcMesh) -> None:
    try:
        await asyncio.wait_for(_stopped(procs), _STOP_S)
    except (TimeoutError, RuntimeError) as error:  # of a host that is lost nothing answers
        logger.warning("a volume of the weights can't be stopped: %r", error)


async def _stopped(procs: ProcMesh) -> None:
    await procs.stop()
