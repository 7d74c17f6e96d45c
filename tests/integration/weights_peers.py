"""Processes that push and fetch weights and can be killed at any moment, for tests of what goes wrong."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from monarch.actor import Actor, ProcMesh, endpoint, this_host
from torch import Tensor

from forge.controller.provisioner import is_running
from forge.weights import begin_push, courier, fetch, publish

SHAPES = {
    "embed": ((65, 16), torch.bfloat16),
    "up": ((6, 24), torch.float32),
    "norm": ((7,), torch.float32),
    "scalar": ((), torch.float32),
}


def make_model(seed: int) -> dict[str, Tensor]:
    """The same tensors, no two values of them alike, in every process that asks with the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator).to(dtype) for n, (shape, dtype) in SHAPES.items()}


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Names of what is not there, not wanted, or another tensor."""
    return [
        name
        for name in found.keys() | wanted.keys()
        if name not in found
        or name not in wanted
        or found[name].dtype != wanted[name].dtype
        or not torch.equal(found[name], wanted[name])
    ]


class Peer(Actor):
    """One process of the job."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def publish(self, version: int, seed: int) -> None:
        await publish(version, make_model(seed), rank=0, world_size=1, publisher="the tests' trainer")

    @endpoint
    async def die_while_pushing(self, version: int, seed: int) -> None:
        push = await begin_push(version, rank=0, world_size=1, publisher="the tests' trainer")
        push.pack(make_model(seed))
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    async def compare(self, version: int, seed: int, timeout_s: float = 20.0) -> list[str]:
        return differences(await fetch(version, timeout_s), make_model(seed))

    @endpoint
    async def stay_in_fetch(self, version: int, reached: str) -> None:
        """Fetches until its hold is taken and nothing is read yet, makes the file `reached`, and stops."""

        async def stay(*args: Any, **kwargs: Any) -> None:
            Path(reached).touch()
            await asyncio.sleep(1000)

        with patch.object(courier, "read", stay):
            await fetch(version)


def is_alive(process: psutil.Process) -> bool:
    """Neither gone nor a zombie, which holds nothing any more."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Peers:
    """Processes by name, an actor in each."""

    def __init__(self, actor: type[Actor] = Peer) -> None:
        self._actor = actor
        self._meshes: dict[str, ProcMesh] = {}
        self._peers: dict[str, Any] = {}
        self.pids: dict[str, int] = {}

    async def start(self, *names: str) -> None:
        for name in names:
            self._meshes[name] = this_host().spawn_procs({"procs": 1})
            self._peers[name] = self._meshes[name].spawn(name, self._actor)
        pids = await asyncio.gather(*(self._peers[name].pid.call_one() for name in names))
        self.pids.update(zip(names, pids, strict=True))

    def __getattr__(self, name: str) -> Any:
        return self._peers[name]

    def __getitem__(self, name: str) -> Any:
        return self._peers[name]

    def kill(self, name: str) -> None:
        """At once, with SIGKILL; `start` puts another one in its place."""
        os.kill(self.pids[name], signal.SIGKILL)

    def stop(self) -> None:
        """They have nothing to lose, and Monarch's way takes seconds each."""
        for name, pid in self.pids.items():
            if is_running(pid):
                self.kill(name)
