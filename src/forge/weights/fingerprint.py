"""A fingerprint of a tensor's bits that is exact, fast, and the same however the tensor is sharded.

Let the row-major bytes of the whole tensor, padded with zeros, be signed 64-bit little-endian words
x_0, x_1, ... The fingerprint is

    F = sum_k A(k div T) * (B(k mod T) * x_k + C(k mod T) * (x_k >> 32))  mod 2^64,     T = 2048,

with A, B, C tables of odd pseudo-random numbers (splitmix64). F is linear in the bits: a shard is the tensor
with zeros elsewhere, so the fingerprints of shards that tile a tensor sum to the tensor's own. Both halves
of a word have an odd factor, which has an inverse mod 2^64, so any change within one half is certain to
show. Two bits i of a half in different places cancel with a chance of about 2^(i - 63): at most 2^-32,
which is what the second term is for; with the first alone, two flipped sign bits would always cancel.
The sums over k mod T are products of an int64 matrix with B and C, which run at the speed of memory.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_T = 2048
_WORD = 8  # bytes
_BATCH = 1 << 15  # words handled at once: small enough to stay in the cache, and for malloc to reuse
_MASK = (1 << 64) - 1
_LANE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(shard: Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> int:
    """What `shard` adds to F, in [0, 2^64): a contiguous CPU tensor, a box of the whole at `offsets`."""
    size = shard.element_size()
    run, starts = _runs(shard.shape, global_shape, offsets)
    flat = shard.detach().reshape(-1)
    if flat.numel() == 0:
        return 0
    if len(starts) == 1:
        return _sum_run(flat.view(torch.uint8), int(starts[0]) * size)
    if run * size % _WORD == 0 and not (starts * size % _WORD).any():
        words = _as_words(flat.view(torch.uint8)).view(len(starts), -1)
        return _sum_gathered(words, starts * size, _WORD)
    lanes = flat.view(_LANE[size]).view(len(starts), run)
    return _sum_gathered(lanes, starts * size, size)


def first_byte(itemsize: int, global_shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Where in the whole tensor's row-major bytes the element at `offsets` lies."""
    strides = _strides(global_shape)
    return itemsize * sum(o * s for o, s in zip(offsets, strides, strict=True))


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _runs(shape: Sequence[int], global_shape: Sequence[int], offsets: Sequence[int]) -> tuple[int, Tensor]:
    """A shard as runs that are contiguous in the whole: elements of one run, and the first index of each."""
    strides = _strides(global_shape)
    dim = len(shape)  # the run spans the dims from here on
    while dim > 0 and list(shape[dim:]) == list(global_shape[dim:]):
        dim -= 1
    starts = torch.tensor([sum(o * s for o, s in zip(offsets, strides, strict=True))])
    for outer in range(dim):
        steps = torch.arange(shape[outer]) * strides[outer]
        starts = (starts[:, None] + steps).reshape(-1)
    return math.prod(shape[dim:]), starts


def _sum_run(data: Tensor, start: int) -> int:
    """Bytes [N] that are contiguous in the whole and begin at its byte `start`."""
    head = min(-start % _WORD, len(data))
    tail = (len(data) - head) % _WORD
    end = len(data) - tail
    total = _sum_partial_word(data[:head], start) + _sum_partial_word(data[end:], start + end)
    return (total + _sum_words(_as_words(data[head:end]), (start + head) // _WORD)) & _MASK


def _sum_partial_word(data: Tensor, start: int) -> int:
    """Less than a word, from byte `start` of the whole on."""
    if len(data) == 0:
        return 0
    padded = torch.zeros(_WORD, dtype=torch.uint8)
    padded[start % _WORD :][: len(data)] = data
    return _sum_within_row(padded.view(torch.int64), start // _WORD)


def _as_words(data: Tensor) -> Tensor:
    """Bytes [8 N] -> int64 [N]; copies only what does not lie on a word's boundary in memory."""
    return (data.clone() if data.storage_offset() % _WORD else data).view(torch.int64)


def _sum_words(words: Tensor, k: int) -> int:
    """Words [N] from index `k` of the whole on: up to the next multiple of T, whole rows of T, the rest."""
    lead = min(-k % _T, len(words))
    num_rows = (len(words) - lead) // _T
    row = (k + lead) // _T
    total = _sum_within_row(words[:lead], k)
    total += _sum_rows(words[lead : lead + num_rows * _T].view(num_rows, _T), row)
    return total + _sum_within_row(words[lead + num_rows * _T :], (row + num_rows) * _T)


def _sum_within_row(words: Tensor, k: int) -> int:
    """Words [N] from index `k` on, all with the same k div T."""
    if len(words) == 0:
        return 0
    first = k % _T
    B, C = _B[first : first + len(words)], _C[first : first + len(words)]
    return int(torch.dot(words, B) + torch.dot(words >> 32, C)) * int(_A(torch.tensor(k // _T)))


def _sum_rows(rows: Tensor, first: int) -> int:
    """Rows [R, T] of words; the first has k div T = `first`."""
    if len(rows) == 0:
        return 0
    batches = rows.split(_BATCH // _T)
    sums = torch.cat([torch.mv(batch, _B) + torch.mv(batch >> 32, _C) for batch in batches])
    return int(torch.dot(sums, _A(torch.arange(first, first + len(rows)))))


def _sum_gathered(lanes: Tensor, starts: Tensor, size: int) -> int:
    """Lanes [R, N] of `size` bytes each; row r is contiguous in the whole from its byte `starts[r]` on."""
    total = 0
    num_rows = max(1, _BATCH // lanes.shape[1])
    within = torch.arange(lanes.shape[1]) * size
    for first in range(0, len(lanes), num_rows):
        position = starts[first : first + num_rows, None] + within
        word = lanes[first : first + num_rows].to(torch.int64)
        if size < _WORD:
            word = (word & ((1 << 8 * size) - 1)) << (8 * (position % _WORD))
        k = position // _WORD
        total += int((_A(k // _T) * (_B[k % _T] * word + _C[k % _T] * (word >> 32))).sum())
    return total & _MASK


def _splitmix(x: Tensor) -> Tensor:
    """The splitmix64 generator's output function (Steele, Lea, Flood, 2014), elementwise on int64."""
    x = x * -7046029254386353131
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _A(rows: Tensor) -> Tensor:
    return _splitmix(rows + (2 * _T + 1)) | 1


_B, _C = (_splitmix(torch.arange(1, 2 * _T + 1)) | 1).split(_T)
