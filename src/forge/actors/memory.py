"""What a process keeps of the memory that it has freed."""

import ctypes

import torch

# numbers of glibc's malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_TOP_PAD_BYTES = 256 * 2**20


def keep_freed_memory() -> None:
    """Lets this process keep memory that it frees. Call it before the thread that computes is started.

    glibc hands every large block back to the kernel and fetches it again zeroed, page by page: a tenth of a
    training step on the CPU, whose gradients and activations come and go each step, and a third of the time
    to pack weights for the engine. Threads share one heap,
    since those of their own are given back whatever is set. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)


def release_cached_memory() -> None:
    """Gives back the memory of the GPU that is kept for tensors to come, for others who share it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
