"""What the machine under this process has: cores, GPUs, ports."""

import itertools
import os
import socket
import subprocess


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def visible_gpus() -> list[str]:
    """GPUs of this machine that CUDA_VISIBLE_DEVICES leaves; without importing torch."""
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
