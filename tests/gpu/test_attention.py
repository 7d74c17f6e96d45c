"""Attention and head on a GPU, against the CPU."""

import pytest
import torch
from torch import Tensor

from forge.actors.trainer.attention import TreeAttention
from forge.actors.trainer.head import TokenHead
from forge.actors.trainer.layout import Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def _layout(lengths: list[list[int]], num_padding: int, queries: slice | None) -> Layout:
    """Of each row the tokens of its segments."""
    tokens = [(r, s) for r, sizes in enumerate(lengths) for s, n in enumerate(sizes) for _ in range(n)]
    rows, segments = torch.tensor(tokens + [(-1, -1)] * num_padding).T
    return Layout(rows, segments, queries)


def _attend(layout: Layout, qkv: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Result and gradients."""
    attended = TreeAttention(TreeAttention.Config())(*qkv, attention_masks=layout, enable_gqa=True)
    return [x.cpu() for x in (attended, *torch.autograd.grad((attended * weights).sum(), qkv))]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("queries", [None, slice(100, 500)], ids=["all", "some"])
def test_flex_attention_equals_attention_by_branches(head_dim: int, queries: slice | None) -> None:
    torch.manual_seed(0)
    for lengths in ([[200, 64, 30, 90], [300], [150, 128, 7]], [[40, 9] for _ in range(12)], [[700]]):
        layout = _layout(lengths, 5, queries)
        on_gpu = Layout(layout.row_ids.cuda(), layout.segment_ids.cuda(), queries)
        size, (start, stop) = len(layout.row_ids), layout.query_range
        shapes = ((stop - start, 4), (size, 2), (size, 2))
        qkv = [torch.randn(1, n, heads, head_dim, requires_grad=True) for n, heads in shapes]
        weights = torch.randn(1, stop - start, 4, head_dim)
        copies = [x.detach().cuda().requires_grad_() for x in qkv]
        pairs = zip(_attend(on_gpu, copies, weights.cuda()), _attend(layout, qkv, weights), strict=True)
        for name, (got, want) in zip(("out", "q", "k", "v"), pairs, strict=True):
            assert (got - want).norm() < 0.01 * want.norm(), (name, lengths)


def test_the_head_gives_the_same_numbers_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    head = TokenHead(TokenHead.Config(in_features=64, out_features=5000))
    hidden, target_ids = torch.randn(1, 300, 64), torch.randint(5000, (1, 300))
    results = []
    for device in ("cpu", "cuda"):
        head.to(device)
        given = hidden.to(device).requires_grad_()
        logprobs, entropies = head(given, target_ids=target_ids.to(device), temperature=0.7)
        grads = torch.autograd.grad((logprobs + entropies).sum(), (given, head.weight))
        results.append([x.detach().cpu() for x in (logprobs, entropies, *grads)])
    for want, got in zip(*results, strict=True):
        assert (got - want).norm() < 0.01 * want.norm()
