"""Provisioner: which process gets which GPU and how many threads."""

import asyncio
import functools
import os
import socket
import subprocess
from dataclasses import dataclass

from forge.controller._monarch import ProcMesh, this_host
from forge.controller.bootstrap import bootstrap
from forge.errors import NotEnoughGPUs


@dataclass(slots=True)
class Placement:
    """The processes of one mesh, and the GPUs they hold."""

    procs: ProcMesh
    gpus: list[int]


class Provisioner:
    """The ledger of this host's GPUs; every mesh of processes comes from here and goes back here."""

    def __init__(self, gpus: list[int] | None = None) -> None:
        self._free = visible_gpus() if gpus is None else list(gpus)
        self._total = len(self._free)

    def reserve(self, name: str, num_gpus: int) -> list[int]:
        """Takes GPUs out of the ledger; NotEnoughGPUs with the arithmetic when they are not there."""
        if num_gpus > len(self._free):
            raise NotEnoughGPUs(
                f"{name} wants {num_gpus} GPUs, {len(self._free)} of {self._total} are free: "
                f"lower services.{name}.procs or num_replicas, or set services.{name}.with_gpus: false"
            )
        taken, self._free = self._free[:num_gpus], self._free[num_gpus:]
        return taken

    def spawn(
        self, name: str, procs: int, gpus: list[int], *, compute_bound: bool, env: dict[str, str]
    ) -> Placement:
        """Starts `procs` processes, one GPU each where `gpus` has any."""
        own = {
            "WORLD_SIZE": str(procs),
            "LOCAL_WORLD_SIZE": str(procs),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": str(max(1, num_cores() // procs) if compute_bound else 1),
            # two pools that spin on the same cores slow each other down many times over
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            **env,
        }
        start = functools.partial(bootstrap, own, gpus or None)
        return Placement(this_host().spawn_procs({"procs": procs}, bootstrap=start, name=name), gpus)

    async def release(self, placement: Placement, pids: list[int]) -> None:
        """Stops the processes and takes their GPUs back; kills what does not stop by itself."""
        try:
            await asyncio.wait_for(_stop(placement.procs), timeout=5)
        finally:
            for pid in pids:
                if is_running(pid):
                    os.kill(pid, 9)
            self._free.extend(placement.gpus)


async def _stop(procs: ProcMesh) -> None:
    await procs.stop()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def visible_gpus() -> list[int]:
    """GPUs of this host that CUDA_VISIBLE_DEVICES leaves; without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [int(part) for part in visible.split(",") if part.strip().isdigit()]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):  # no driver: no GPUs
        return []
    return list(range(len([line for line in listing.stdout.splitlines() if line.startswith("GPU")])))


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_running(pid: int) -> bool:
    """Whether a process of ours still runs; one that has ended but was not reaped does not count."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
