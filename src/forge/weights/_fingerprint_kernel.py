"""The loop of the fingerprint, compiled: sums, and on the way copies, at the speed of memory.

Import it from a thread and only when there is something to sum: numba takes half a second to load.
"""

from typing import Any

import numpy as np
from numba import njit, types

T = 4096
_WORD = 4  # bytes


def _splitmix(x: np.ndarray) -> np.ndarray:
    """The splitmix64 generator's output function (Steele, Lea, Flood, 2014), elementwise on uint64."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_splitmix_scalar: Any = njit(_splitmix, inline="always")
# 32 bits each, and words of 32 bits: products that every CPU has instructions for, several at a time
_W = (_splitmix(np.arange(1, T + 1, dtype=np.uint64)) >> np.uint64(32) | np.uint64(1)).astype(np.uint32)

# Words need not lie on a word's boundary in memory: without `aligned` they are read from anywhere.
_source = types.Array(types.uint8, 1, "C", readonly=True, aligned=False)
_target = types.Array(types.uint8, 1, "C", aligned=False)
_starts = types.Array(types.int64, 1, "C")


@njit(inline="always")
def _A(row: int) -> np.uint64:
    return _splitmix_scalar(np.uint64(row + T + 1)) | np.uint64(1)


@njit(
    [
        types.uint64(_source, types.none, types.int64, _starts),
        types.uint64(_source, _target, types.int64, _starts),
    ],
    nogil=True,
    cache=True,
)
def sum_runs(data: np.ndarray, copy: np.ndarray | None, run: int, starts: np.ndarray) -> int:
    """What runs of `run` bytes each add to the fingerprint; writes them to `copy`, too, unless it is None.

    data, copy: [R run] uint8. starts: [R], the byte of the whole tensor at which each run begins.
    """
    total = np.uint64(0)
    here = 0
    for byte in starts:
        end = here + run
        while here < end:
            i, skipped = byte // _WORD, byte % _WORD
            j = i % T
            row_sum = np.uint64(0)
            if skipped or end - here < _WORD:  # a part of a word
                nbytes = min(_WORD - skipped, end - here)
                word = np.uint64(0)
                for n in range(nbytes):
                    word |= np.uint64(data[here + n]) << np.uint64(8 * (skipped + n))
                    if copy is not None:
                        copy[here + n] = data[here + n]
                row_sum += np.uint64(_W[j]) * word
            else:  # words up to the end of the table, or of the run
                num_words = min(T - j, (end - here) // _WORD)
                nbytes = num_words * _WORD
                words = data[here : here + nbytes].view(np.uint32)
                if copy is not None:
                    copied = copy[here : here + nbytes].view(np.uint32)
                for n in range(num_words):
                    if copy is not None:
                        copied[n] = words[n]  # pyright: ignore[reportPossiblyUnboundVariable]
                    row_sum += np.uint64(_W[j + n]) * np.uint64(words[n])
            total += _A(i // T) * row_sum
            here += nbytes
            byte += nbytes
    return total  # type: ignore[return-value]
