"""A fingerprint of a tensor's bits that is exact, fast, and the same however the tensor is sharded.

Let the row-major bytes of the whole tensor, padded with zeros, be unsigned 32-bit little-endian words
y_0, y_1, ... The fingerprint is

    F = sum_i A(i div T) * W(i mod T) * y_i  mod 2^64,     T = 4096,

with A of 64 and W of 32 pseudo-random bits (splitmix64), all odd. F is linear in the words: a shard is the
tensor with zeros elsewhere, so the fingerprints of shards that tile a tensor sum to the tensor's own. Odd
factors have an inverse mod 2^64, and words are less than that, so any change within one word is certain to
show. So are changes of the same bit in two words of the same T, since no two W are equal; in words further
apart bit b cancels with a chance of about 2^(b - 63), which is 2^-32 at most.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from operator import mul

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_CACHED_NBYTES = 1 << 20  # what is copied is still in the cache of its core when its fingerprint is taken
_STAGED_NBYTES = 1 << 23  # of a copy from another device: long enough for the bus
_NBYTES_PER_THREAD = 1 << 22  # for less it isn't worth to wake another
_MAX_THREADS = 4
_FIRST = np.zeros(1, np.int64)


def fingerprint(shard: Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> int:
    """What `shard` adds to F, in [0, 2^64): a contiguous CPU tensor, a box of the whole at `offsets`."""
    return _sum(shard.detach(), None, global_shape, offsets)


def copy_and_fingerprint(
    dst: Tensor, src: Tensor, global_shape: Sequence[int], offsets: Sequence[int]
) -> int:
    """Copies `src` into `dst` and returns what `dst` then adds to F, reading `src` once and `dst` never.

    Both are of the shape of a box of the whole at `offsets`. dst: contiguous, on the CPU. src: of any layout
    and device; another dtype is converted as `Tensor.copy_` does it.
    """
    assert dst.shape == src.shape, f"{tuple(src.shape)} does not fit {tuple(dst.shape)}"
    assert dst.is_contiguous() and dst.device.type == "cpu", "dst is contiguous and on the CPU"
    src = src.detach()
    if src.device.type != "cpu":
        return _from_device(dst, src, global_shape, offsets)
    if src.dtype == dst.dtype and src.is_contiguous():
        return _sum(src, dst, global_shape, offsets)
    boxes = _boxes(dst, offsets, _CACHED_NBYTES)
    return sum(_sum(dst[box].copy_(src[box]), None, global_shape, place) for box, place in boxes) & _MASK


def _from_device(dst: Tensor, src: Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Through page-locked memory, into which a GPU copies without an intermediate buffer of its driver."""
    numel = _STAGED_NBYTES // dst.element_size()
    staging = torch.empty(min(numel, dst.numel()), dtype=dst.dtype, pin_memory=src.is_cuda)
    total = 0
    for box, place in _boxes(dst, offsets, _STAGED_NBYTES):
        staged = staging[: dst[box].numel()].view(dst[box].shape)
        total += _sum(staged.copy_(src[box]), dst[box], global_shape, place)
    return total & _MASK


def first_byte(itemsize: int, global_shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Where in the whole tensor's row-major bytes the element at `offsets` lies."""
    return itemsize * sum(map(mul, offsets, _strides(global_shape)))


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _sum(data: Tensor, copy: Tensor | None, global_shape: Sequence[int], offsets: Sequence[int]) -> int:
    """The fingerprint of `data`, which is written to `copy` on the way. Large ones by several threads."""
    # half of the cores: not they run out first, but memory's rate, which one core of two takes up
    threads = min(_MAX_THREADS, torch.get_num_threads() // 2) if data.nbytes >= 2 * _NBYTES_PER_THREAD else 1
    if threads < 2:
        return _sum_box(data, copy, global_shape, offsets) & _MASK

    def sum_box(box: tuple[slice, ...], place: tuple[int, ...]) -> int:
        return _sum_box(data[box], None if copy is None else copy[box], global_shape, place)

    boxes = _boxes(data, offsets, max(_NBYTES_PER_THREAD, -(-data.nbytes // threads)))
    return sum(_threads().map(sum_box, *zip(*boxes, strict=True))) & _MASK


def _sum_box(data: Tensor, copy: Tensor | None, global_shape: Sequence[int], offsets: Sequence[int]) -> int:
    from forge.weights._fingerprint_kernel import sum_runs  # slow to load, and not every process needs it

    run, starts = _runs(data.shape, data.element_size(), tuple(global_shape), offsets)
    return sum_runs(_as_bytes(data), None if copy is None else _as_bytes(copy), run, starts)


def _as_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _runs(
    shape: torch.Size, itemsize: int, global_shape: tuple[int, ...], offsets: Sequence[int]
) -> tuple[int, np.ndarray]:
    """A shard as runs that are contiguous in the whole: bytes of one run, and the first byte of each [R]."""
    if shape == global_shape:
        return math.prod(shape) * itemsize, _FIRST
    dim = len(shape)  # the run spans the dims from here on
    while dim > 0 and shape[dim:] == global_shape[dim:]:
        dim -= 1
    starts = np.array([first_byte(itemsize, global_shape, offsets)])
    for outer, stride in enumerate(_strides(global_shape)[:dim]):
        starts = np.add.outer(starts, np.arange(shape[outer]) * (stride * itemsize)).reshape(-1)
    return math.prod(shape[dim:]) * itemsize, starts


def _boxes(
    tensor: Tensor, offsets: Sequence[int], nbytes: int
) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """Cuts a shard into boxes of about `nbytes` that are contiguous in it: (index, offsets in the whole)."""
    shape, limit = tensor.shape, max(1, nbytes // tensor.element_size())
    strides = _strides(shape)
    dim = next((dim for dim, stride in enumerate(strides) if stride <= limit), 0)
    steps = [1] * dim + [limit // max(1, stride) for stride in strides[dim : dim + 1]]
    for firsts in itertools.product(*(range(0, n, step) for n, step in zip(shape, steps, strict=False))):
        box = tuple(slice(first, first + step) for first, step in zip(firsts, steps, strict=True))
        inner = (0,) * (len(shape) - len(firsts))
        yield box, tuple(o + first for o, first in zip(offsets, (*firsts, *inner), strict=True))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="fingerprint")
