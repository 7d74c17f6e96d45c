"""The fingerprint against a plain-Python definition, and its independence of how a tensor is sharded."""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from forge.weights import fingerprint as fingerprint_module
from forge.weights.fingerprint import copy_and_fingerprint, fingerprint, first_byte

MASK = (1 << 64) - 1
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool, torch.complex128]


def reference(tensor: Tensor) -> int:
    """The definition in the module's docstring, one Python integer at a time."""

    def splitmix(x: int) -> int:
        x = x * 0x9E3779B97F4A7C15 & MASK
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
        return x ^ x >> 31

    raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    raw += bytes(-len(raw) % 4)
    total = 0
    for i in range(len(raw) // 4):
        word = int.from_bytes(raw[4 * i : 4 * i + 4], "little")
        total += (splitmix(4097 + i // 4096) | 1) * (splitmix(1 + i % 4096) >> 32 | 1) * word
    return total & MASK


def of_whole(tensor: Tensor) -> int:
    return fingerprint(tensor, tensor.shape, (0,) * tensor.dim())


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (nbytes,), dtype=torch.uint8).view(dtype).reshape(shape)


def random_boxes(shape: tuple[int, ...], rng: random.Random):
    """Offsets and sizes of boxes that tile a tensor: every dim cut at random places."""
    cuts = []
    for n in shape:
        inner = rng.sample(range(1, n), min(n - 1, rng.randint(0, 3))) if n > 1 else []
        edges = [0, *sorted(inner), n]
        cuts.append(list(itertools.pairwise(edges)))
    for box in itertools.product(*cuts):
        yield tuple(a for a, _ in box), tuple(b - a for a, b in box)


def shard(tensor: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].contiguous()


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (130, 257), (40000,)])
def test_equals_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = random_tensor(shape, dtype)
    assert of_whole(tensor) == reference(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(12))
def test_shards_sum_to_the_whole_however_it_is_cut(dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    shape = tuple(rng.choice([1, 2, 3, 8, 17, 64]) for _ in range(rng.randint(1, 4)))
    tensor = random_tensor(shape, dtype)
    parts = [fingerprint(shard(tensor, o, n), shape, o) for o, n in random_boxes(shape, rng)]
    assert sum(parts) & MASK == of_whole(tensor)


@pytest.mark.parametrize("cut", [8, 64, 100, 128, 129])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_a_matrix_larger_than_the_tables_sum_to_the_whole(dim: int, cut: int) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(300, 260).to(torch.bfloat16)
    total = 0
    for start in range(0, tensor.shape[dim], cut):
        part = tensor.narrow(dim, start, min(cut, tensor.shape[dim] - start)).contiguous()
        total += fingerprint(part, tensor.shape, (start, 0) if dim == 0 else (0, start))
    assert total & MASK == of_whole(tensor)


def test_an_empty_shard_adds_nothing() -> None:
    assert fingerprint(torch.empty(0, 4), (3, 4), (3, 0)) == 0


def test_a_shard_need_not_lie_on_a_word_boundary_in_memory() -> None:
    memory = torch.arange(101, dtype=torch.int16)
    assert of_whole(memory[1:]) == of_whole(memory[1:].clone())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_flipped_bit_shows(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    tensor = random_tensor((5, 9), dtype)
    seen = {of_whole(tensor)}
    raw = tensor.view(-1).view(torch.uint8)
    for position in range(len(raw)):
        for bit in range(8):
            raw[position] ^= 1 << bit
            seen.add(of_whole(tensor))
            raw[position] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(raw)


def test_every_swap_of_two_elements_shows() -> None:
    tensor = torch.arange(60, dtype=torch.bfloat16).view(6, 10)
    flat = tensor.view(-1)
    original = of_whole(tensor)
    for i, j in itertools.combinations(range(60), 2):
        flat[[i, j]] = flat[[j, i]]
        assert of_whole(tensor) != original
        flat[[i, j]] = flat[[j, i]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_value_and_its_negative_that_changed_places_show(dtype: torch.dtype) -> None:
    tensor = torch.ones(64, dtype=dtype)
    seen = set()
    for negative in range(64):
        tensor[negative] = -1
        seen.add(of_whole(tensor))
        tensor[negative] = 1
    assert len(seen) == 64


def test_no_two_words_of_a_row_have_the_same_factor() -> None:
    from forge.weights._fingerprint_kernel import _W, T

    assert len(set(_W.tolist())) == T and all(factor % 2 for factor in _W.tolist())


def test_a_swap_of_rows_far_apart_shows() -> None:
    tensor = torch.arange(8 * 4096, dtype=torch.int64).view(8, 4096)
    assert of_whole(tensor) != of_whole(tensor.flip(0).contiguous())


def places(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The whole, and boxes of it at which the runs are long, short, and not of whole words."""
    halves = tuple(max(1, n // 2) for n in shape)
    return [((0,) * len(shape), shape), (tuple(n - h for n, h in zip(shape, halves, strict=True)), halves)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (130, 257), (3, 2, 41)])
def test_a_copy_is_the_source_and_its_fingerprint_that_of_the_copy(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    for offsets, sizes in places(shape):
        memory = random_tensor((math.prod(sizes) + 1,), dtype)
        source = memory[1:].view(sizes)  # often not on a word's boundary
        copy = torch.zeros(sizes, dtype=dtype)
        value = copy_and_fingerprint(copy, source, shape, offsets)
        assert torch.equal(bits(copy), bits(source))
        assert value == fingerprint(source.clone(), shape, offsets)


@pytest.mark.parametrize("in_blocks_of", [1 << 19, 40])
@pytest.mark.parametrize(
    "source",
    [
        torch.linspace(-3, 3, 3 * 5 * 24).view(3, 5, 24).requires_grad_(),
        torch.linspace(-3, 3, 3 * 5 * 24).view(24, 5, 3).permute(2, 1, 0),
        torch.linspace(-3, 3, 3 * 5 * 24).to(torch.bfloat16).view(5, 3, 24).transpose(0, 1),
        torch.arange(3 * 5 * 48).to(torch.bfloat16).view(3, 5, 48)[..., ::2],
    ],
)
def test_a_copy_is_cast_and_made_contiguous(
    source: Tensor, in_blocks_of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint_module, "_CACHED_NBYTES", in_blocks_of)
    copy = torch.zeros(source.shape, dtype=torch.bfloat16)
    value = copy_and_fingerprint(copy, source, (4, 9, 24), (1, 2, 0))
    expected = source.detach().to(torch.bfloat16).contiguous()
    assert torch.equal(bits(copy), bits(expected)) and not copy.requires_grad
    assert value == fingerprint(expected, (4, 9, 24), (1, 2, 0))

    monkeypatch.setattr(fingerprint_module, "_STAGED_NBYTES", in_blocks_of)
    staged = torch.zeros_like(copy)
    assert fingerprint_module._from_device(staged, source.detach(), (4, 9, 24), (1, 2, 0)) == value
    assert torch.equal(bits(staged), bits(expected))


@pytest.mark.parametrize("dim", [0, 1])
def test_several_threads_come_to_the_same(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(300, 260).to(torch.bfloat16)
    part = tensor.narrow(dim, 3, 200).contiguous()
    offsets = (3, 0) if dim == 0 else (0, 3)
    expected = fingerprint(part, tensor.shape, offsets)
    monkeypatch.setattr(fingerprint_module, "_NBYTES_PER_THREAD", 1 << 13)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    copy = torch.zeros_like(part)
    assert copy_and_fingerprint(copy, part, tensor.shape, offsets) == expected
    assert torch.equal(bits(copy), bits(part))


def test_first_byte_counts_in_row_major_order() -> None:
    assert first_byte(2, (3, 5), (2, 1)) == 2 * (2 * 5 + 1)
    assert first_byte(4, (), ()) == 0
