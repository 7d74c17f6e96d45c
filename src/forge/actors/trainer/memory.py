"""The C allocator's manners."""

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD_BYTES = 256 * 2**20


def keep_freed_memory() -> None:
    """Lets this process keep memory that it frees.

    glibc hands every large block back to the kernel and fetches it again zeroed, page by page: a tenth of a
    training step on the CPU, whose gradients and activations come and go each step. Other C libraries are
    left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)
