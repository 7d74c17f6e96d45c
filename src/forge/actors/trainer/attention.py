"""Attention over rows that hold one prompt and several completions of it, packed without padding."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.actors._titan import FlexAttention

MAX_SAVED_BYTES = 128 * 2**20
"""Attention probabilities that one layer may keep for its backward pass on the CPU."""


def tree_mask(segment_ids: Tensor) -> Tensor:
    """segment_ids [B, L] -> bool [B, 1, L, L], True where a token (dim 2) attends to another (dim 3).

    A token attends to earlier tokens of the prompt (segment 0) and of its own segment, and to itself, so that
    no row, padding included, is without anything to attend to.
    """
    length = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    visible = same | (segment_ids == 0)[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    return (visible & causal)[:, None]


def is_causal(segment_ids: Tensor) -> bool:
    """Whether plain causal attention is the same: at most one completion a row, padding only at the end."""
    padding = segment_ids < 0
    padding_inside = (padding[:, :-1] & ~padding[:, 1:]).any()
    return bool((segment_ids.max() <= 1) & ~padding_inside)


@dataclass(frozen=True)
class RowLayout:
    """Where the S real tokens of a batch stand in its B padded rows of L cells, and what they attend to."""

    segment_ids: Tensor  # [B, L]
    cells: Tensor = field(init=False)  # [S]: the cell, row * L + column, of each token

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", (self.segment_ids.flatten() >= 0).nonzero().squeeze(1))

    @cached_property
    def mask(self) -> Tensor | None:
        """bool [B, 1, L, L], None where plain causal attention is the same."""
        return None if is_causal(self.segment_ids) else tree_mask(self.segment_ids)

    @cached_property
    def bias(self) -> Tensor:
        """float32 [B, 1, L, L]: 0 where a token attends to another, else -inf."""
        mask = tree_mask(self.segment_ids)
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)

    @cached_property
    def token_of_cell(self) -> Tensor:
        """[B * L]: the token in each cell; the number of the token before it where the cell is padding."""
        return (self.segment_ids.flatten() >= 0).cumsum(0) - 1

    def pad(self, tokens: Tensor) -> Tensor:
        """[1, S, ...] -> [B, L, ...], zeros in the padding."""
        rows, length = self.segment_ids.shape
        if len(self.cells) == rows * length:
            return tokens.reshape(rows, length, *tokens.shape[2:])
        padded = tokens.new_zeros(rows * length, *tokens.shape[2:])
        return padded.index_copy(0, self.cells, tokens[0]).view(rows, length, *tokens.shape[2:])

    def unpad(self, rows: Tensor) -> Tensor:
        """[B, L, ...] -> [1, S, ...]."""
        flat = rows.reshape(1, -1, *rows.shape[2:])
        return flat if len(self.cells) == flat.shape[1] else flat[:, self.cells]


class TreeAttention(FlexAttention):
    """Scaled dot product attention over packed rows, forward and backward on every device.

    A FlexAttention by type only: by that torchtitan knows how to wrap it for context parallelism.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)

    # The argument names are torchtitan's: its sharding rules refer to them.
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: RowLayout,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """q [1, S, N, H], k and v [1, S, KV, H] -> [1, S, N, H]."""
        layout = attention_masks
        scale = scale or q_BLNH.shape[-1] ** -0.5
        if _fits_dense(q_BLNH, layout):
            return DenseAttention.apply(q_BLNH, k_BLNH, v_BLNH, layout, scale)  # pyright: ignore[reportReturnType]
        q, k, v = (layout.pad(x).transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        mask = layout.mask
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
        )
        return layout.unpad(attended.transpose(1, 2))


def _fits_dense(q: Tensor, layout: RowLayout) -> bool:
    rows, length = layout.segment_ids.shape
    saved = rows * q.shape[2] * length * length * q.element_size()
    return q.device.type == "cpu" and saved <= MAX_SAVED_BYTES


class DenseAttention(torch.autograd.Function):
    """The same by plain matrix products that keep their probabilities.

    On the CPU and rows of some hundred tokens about four times as fast as torch's fused kernel in bfloat16
    (2.4 against 10.9 ms for 4 rows of 125 tokens, forward and backward), and no slower in float32.
    Heads that share keys are laid behind each other, so that no key is repeated.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: RowLayout,
        scale: float,
    ) -> Tensor:
        rows, length = layout.segment_ids.shape
        q, k, v = (_heads_first(layout.pad(x), k.shape[2]) for x in (q, k, v))
        scores = torch.bmm(q * scale, k.transpose(1, 2))
        by_row = scores.view(rows, -1, length, length)
        by_row += layout.bias
        probabilities = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(q, k, v, probabilities)
        ctx.layout, ctx.scale = layout, scale  # type: ignore[attr-defined]
        return layout.unpad(_tokens_first(torch.bmm(probabilities, v), rows, length))

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, probabilities = ctx.saved_tensors  # type: ignore[attr-defined]
        layout, scale = ctx.layout, ctx.scale  # type: ignore[attr-defined]
        rows, length = layout.segment_ids.shape
        grad = _heads_first(layout.pad(grad), k.shape[0] // rows)
        grad_v = torch.bmm(probabilities.transpose(1, 2), grad)
        grad_p = torch.bmm(grad, v.transpose(1, 2))
        grad_scores = torch.ops.aten._softmax_backward_data(grad_p, probabilities, -1, grad_p.dtype)
        grad_scores *= scale
        grads = torch.bmm(grad_scores, k), torch.bmm(grad_scores.transpose(1, 2), q), grad_v
        return *(layout.unpad(_tokens_first(g, rows, length)) for g in grads), None, None


def _heads_first(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, L, KV * G, H] -> [B * KV, G * L, H]."""
    return x.transpose(1, 2).reshape(len(x) * num_kv_heads, -1, x.shape[-1])


def _tokens_first(x: Tensor, rows: int, length: int) -> Tensor:
    """[B * KV, G * L, H] -> [B, L, KV * G, H]."""
    return x.view(rows, -1, length, x.shape[-1]).transpose(1, 2)
