"""Provisioner: which process gets which GPU and how many threads."""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forge.controller._monarch import ProcMesh, this_host
from forge.controller.bootstrap import bootstrap
from forge.errors import NotEnoughGPUs

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Placement:
    """The processes of one mesh."""

    procs: ProcMesh


class Provisioner:
    """The ledger of this host's GPUs; every mesh of processes comes from here and goes back here.

    GPUs are known by what CUDA_VISIBLE_DEVICES takes: "0", "GPU-5ee1...", "MIG-...".
    """

    def __init__(self, gpus: list[str] | None = None) -> None:
        self._free = visible_gpus() if gpus is None else list(gpus)
        self._total = len(self._free)

    @property
    def num_free(self) -> int:
        """GPUs that nobody holds."""
        return len(self._free)

    def check(self, demands: Mapping[str, int]) -> None:
        """Raises NotEnoughGPUs, with the arithmetic, when so many GPUs by service are not free in all."""
        wanted = sum(demands.values())
        if wanted > len(self._free):
            parts = " + ".join(f"{name} {num}" for name, num in demands.items() if num)
            raise NotEnoughGPUs(
                f"{parts} = {wanted} GPUs are wanted, {len(self._free)} of {self._total} are free: lower "
                "procs or num_replicas of a service, or set its with_gpus to false"
            )

    def reserve(self, name: str, num_gpus: int) -> list[str]:
        """Takes GPUs out of the ledger; NotEnoughGPUs with the arithmetic when they are not there."""
        if num_gpus > len(self._free):
            raise NotEnoughGPUs(
                f"{name} wants {num_gpus} GPUs, {len(self._free)} of {self._total} are free: "
                f"lower services.{name}.procs or num_replicas, or set services.{name}.with_gpus: false"
            )
        taken, self._free = self._free[:num_gpus], self._free[num_gpus:]
        return taken

    def give_back(self, gpus: list[str]) -> None:
        """Puts GPUs back into the ledger, behind those that are free: a suspect one is taken last."""
        self._free.extend(gpus)

    def spawn(
        self, name: str, procs: int, gpus: list[str], *, compute_bound: bool, env: dict[str, str]
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
        start = functools.partial(bootstrap, own, gpus)
        return Placement(this_host().spawn_procs({"procs": procs}, bootstrap=start, name=name))

    async def release(self, placement: Placement, pids: list[int], *, kill: bool = False) -> None:
        """Stops the processes; kills those that don't stop by themselves, or all at once with `kill`."""
        if kill:
            end_processes(pids)
        try:
            await asyncio.wait_for(_stop(placement.procs), timeout=5)
        except TimeoutError:
            logger.debug("%s did not stop in time: killing it", placement.procs)
        finally:
            end_processes(pids)


async def _stop(procs: ProcMesh) -> None:
    await procs.stop()


def end_processes(pids: Iterable[int]) -> None:
    """Kills those that still run."""
    for pid in pids:
        if is_running(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def visible_gpus() -> list[str]:
    """GPUs of this host that CUDA_VISIBLE_DEVICES leaves; without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        parts = [part.strip() for part in visible.split(",")]
        return list(itertools.takewhile(lambda part: part not in ("", "-1"), parts))  # CUDA stops there too
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):  # no driver: no GPUs
        return []
    num_gpus = len([line for line in listing.stdout.splitlines() if line.startswith("GPU")])
    return [str(i) for i in range(num_gpus)]


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
