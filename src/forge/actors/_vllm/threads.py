"""Threads that compute beside the engine's."""

import ctypes
from pathlib import Path

import torch

_OPENMP = ("libgomp", "libiomp", "libomp")


def use_one_thread() -> None:
    """Has what this thread computes stay on this thread, whatever the engine's uses.

    `torch.set_num_threads` can't do it: vLLM disables it, and of MKL it would change the engine's too.
    """
    torch.get_num_threads()  # on a thread's first use, torch sets the number itself
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    for path in libraries:
        if Path(path).name.startswith(_OPENMP):
            ctypes.CDLL(path).omp_set_num_threads(1)
