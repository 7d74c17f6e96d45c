"""Attention over a stream of trees, against a mask that is written out pair by pair."""

import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from forge.actors.trainer import branches, tree_blocks
from forge.actors.trainer.attention import TreeAttention
from forge.actors.trainer.layout import Layout

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, SCALE = 4, 2, 8, 0.3


def _layouts() -> Iterator[Layout]:
    """Rows of random trees and padding, at last padding alone. The queries are all, some, or the last tokens;
    segments stand in order, or not."""
    rng = random.Random(0)
    for i in range(12):
        tokens = []
        for row in range(rng.randint(1, 5)):
            segments = [s for s in range(rng.randint(1, 5)) for _ in range(rng.randint(1, 9))]
            if i % 4 == 3:
                rng.shuffle(segments)
            tokens += [(row, s) for s in segments]
        tokens += [(-1, -1)] * (i % 5)
        rows, segments = torch.tensor(tokens).T
        size = len(rows)
        yield Layout(
            rows, segments, (None, slice(size // 3, 2 * size // 3 + 1), slice(size // 2, size))[i % 3]
        )
    yield Layout(torch.tensor([-1, -1]), torch.tensor([-1, -1]))


def _visible(layout: Layout) -> Tensor:
    """bool [Sq, S], by the words of Layout."""
    rows, segments = layout.row_ids.tolist(), layout.segment_ids.tolist()

    def sees(i: int, j: int) -> bool:
        return i == j or (j < i and rows[i] == rows[j] >= 0 and segments[j] in (0, segments[i]))

    return torch.tensor([[sees(i, j) for j in range(len(rows))] for i in range(*layout.query_range)])


def _qkv(layout: Layout, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    start, stop = layout.query_range
    sizes = ((stop - start, NUM_HEADS), *[(len(layout.row_ids), NUM_KV_HEADS)] * 2)
    made = (torch.randn(1, n, heads, HEAD_DIM, generator=generator) for n, heads in sizes)
    return [x.to(dtype).requires_grad_() for x in made]


def _attend(layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return TreeAttention(TreeAttention.Config())(
        q, k, v, attention_masks=layout, enable_gqa=True, scale=SCALE
    )


def _by_mask(layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(
        q, k, v, attn_mask=_visible(layout), scale=SCALE, enable_gqa=True
    )
    return attended.transpose(1, 2)


@pytest.mark.parametrize(
    ("max_queries", "branch_cells"), [(256, 512), (256, 30), (3, 1)], ids=["merged", "some merged", "cut"]
)
def test_values_and_gradients_equal_the_mask_written_out(
    max_queries: int, branch_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branches, "MAX_QUERIES", max_queries)
    monkeypatch.setattr(branches, "BRANCH_CELLS", branch_cells)
    monkeypatch.setattr(branches, "KEY_CELLS", 0)
    monkeypatch.setattr(branches, "BATCH_CELLS", 20)
    for layout in _layouts():
        qkv = _qkv(layout)
        got, want = _attend(layout, *qkv), _by_mask(layout, *qkv)
        assert (got - want).abs().max() < 1e-5
        weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
        grads = torch.autograd.grad((got * weights).sum(), qkv)
        expected = torch.autograd.grad((want * weights).sum(), qkv)
        for name, mine, theirs in zip("qkv", grads, expected, strict=True):
            assert (mine - theirs).abs().max() < 1e-5, name


def test_bfloat16_gradients_stay_close_to_float32() -> None:
    layout = next(_layouts())
    exact, rounded = _qkv(layout), _qkv(layout, torch.bfloat16)
    for tensors in (exact, rounded):
        _attend(layout, *tensors).float().square().sum().backward()
    for want, got in zip(exact, rounded, strict=True):
        assert want.grad is not None and got.grad is not None
        assert (want.grad - got.grad.float()).norm() < 0.02 * want.grad.norm()


def test_little_is_computed_in_vain() -> None:
    """8 completions behind a prompt of 200 need 200 x 200 + 8 x 64 x 264 cells, not 712 x 712; of a text of
    1024 tokens half of the cells."""
    for lengths, limit in (([200] + [64] * 8, 200 * 200 + 8 * 64 * 264), ([1024], 0.63 * 1024**2)):
        segments = torch.tensor([s for s, n in enumerate(lengths) for _ in range(n)])
        batches = Layout(torch.zeros_like(segments), segments).branches.batches
        assert sum(batch.bias(torch.float32).numel() for batch in batches) <= limit


@pytest.mark.parametrize("size", [4, 8])
def test_flex_attention_gets_the_same_mask_in_blocks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_blocks, "BLOCK", size)
    for layout in _layouts():
        start, stop = layout.query_range
        visible = _visible(layout)
        partial, full = tree_blocks.tree_blocks(layout.row_ids, layout.segment_ids, start, stop)
        for i, j in torch.cartesian_prod(*map(torch.arange, partial.shape)).tolist():
            pairs = visible[i * size : (i + 1) * size, j * size : (j + 1) * size]
            if full[i, j]:
                assert pairs.all() and pairs.numel() == size * size and not partial[i, j]
            elif not partial[i, j]:
                assert not pairs.any()
        q, k, v = (x.detach().transpose(1, 2) for x in _qkv(layout))
        got = flex_attention(q, k, v, block_mask=layout.block_mask, scale=SCALE, enable_gqa=True)
        assert isinstance(got, Tensor)
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=SCALE, enable_gqa=True)
        assert (got - want).abs().max() < 1e-5


def test_blocks_of_rows_and_completions_that_see_nothing_of_each_other_are_skipped() -> None:
    size = tree_blocks.BLOCK
    rows = torch.tensor([0] * 4 * size + [1] * 2 * size)
    segments = torch.tensor([0] * size + [1] * size + [2] * 2 * size + [0] * 2 * size)
    partial, full = tree_blocks.tree_blocks(rows, segments, 0, len(rows))
    assert torch.equal(partial, torch.eye(6, dtype=torch.bool))
    assert full.nonzero().tolist() == [[1, 0], [2, 0], [3, 0], [3, 2], [5, 4]]
