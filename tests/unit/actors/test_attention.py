"""Attention over packed rows, against one sequence at a time."""

import pytest
import torch
import torch.nn.functional as F

from forge.actors.trainer import attention
from forge.actors.trainer.attention import RowLayout, TreeAttention, is_causal, tree_mask

# row 0: prompt of 3, completions of 2 and 3; row 1: prompt of 2, one completion of 2, padding
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 1, -1, -1, -1, -1]])
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8


def _qkv(num_tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    shapes = [(1, num_tokens, n, HEAD_DIM) for n in heads]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return TreeAttention(TreeAttention.Config())(
        q, k, v, attention_masks=RowLayout(SEGMENTS), enable_gqa=True, scale=0.3
    )


def _one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same, each prompt with one completion as a sequence of its own."""
    out = torch.zeros(q.shape)
    first = 0
    for segments in SEGMENTS:
        segments = segments[segments >= 0]
        for completion in range(1, int(segments.max()) + 1):
            tokens = first + ((segments == 0) | (segments == completion)).nonzero().squeeze(1)
            chosen = (x[:, tokens].transpose(1, 2) for x in (q, k, v))
            result = F.scaled_dot_product_attention(*chosen, is_causal=True, scale=0.3, enable_gqa=True)
            out = out.index_copy(1, tokens, result.transpose(1, 2))
        first += len(segments)
    return out


def test_a_token_sees_its_prompt_and_the_past_of_its_own_completion_only() -> None:
    mask = tree_mask(SEGMENTS)[0, 0]
    assert mask[4].tolist() == [True, True, True, True, True, False, False, False]
    assert mask[6].tolist() == [True, True, True, False, False, True, True, False]
    assert mask[1].tolist() == [True, True, False, False, False, False, False, False]


def test_every_row_of_the_mask_has_something_to_attend_to() -> None:
    assert tree_mask(SEGMENTS).any(-1).all()


def test_one_completion_a_row_is_plain_causal_attention() -> None:
    assert not is_causal(SEGMENTS)
    assert is_causal(SEGMENTS[1:])
    assert RowLayout(SEGMENTS[1:]).mask is None
    assert not is_causal(torch.tensor([[0, -1, 1]]))


def test_padding_and_unpadding_are_inverse() -> None:
    layout = RowLayout(SEGMENTS)
    tokens = torch.arange(1.0, 13.0).view(1, 12, 1)
    padded = layout.pad(tokens)
    assert padded[1, :, 0].tolist() == [9, 10, 11, 12, 0, 0, 0, 0]
    assert torch.equal(layout.unpad(padded), tokens)
    assert layout.token_of_cell[8].item() == 8  # row 1, column 0


@pytest.mark.parametrize("max_saved_bytes", [2**30, 0], ids=["dense", "fused"])
def test_packed_rows_equal_one_sequence_at_a_time(
    max_saved_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MAX_SAVED_BYTES", max_saved_bytes)
    q, k, v = _qkv(12)
    weights = torch.randn(1, 12, NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    packed, single = _attend(q, k, v), _one_by_one(q, k, v)
    assert (packed - single).abs().max() < 1e-6
    grads = torch.autograd.grad((packed * weights).sum(), (q, k, v))
    expected = torch.autograd.grad((single * weights).sum(), (q, k, v))
    for name, got, want in zip("qkv", grads, expected, strict=True):
        assert (got - want).abs().max() < 1e-5, name


def test_bfloat16_gradients_stay_close_to_float32() -> None:
    exact, rounded = _qkv(12), _qkv(12, torch.bfloat16)
    for tensors in (exact, rounded):
        _attend(*tensors).float().square().sum().backward()
    for want, got in zip(exact, rounded, strict=True):
        assert want.grad is not None and got.grad is not None
        assert (want.grad - got.grad.float()).norm() < 0.02 * want.grad.norm()
