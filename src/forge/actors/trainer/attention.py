"""Attention over a stream of rows, each one prompt and several completions of it, without padding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from forge.actors._titan import FlexAttention
from forge.actors.trainer.branches import BranchBatch, Branches
from forge.actors.trainer.layout import Layout


class TreeAttention(FlexAttention):
    """Scaled dot product attention over packed rows, forward and backward on every device.

    On GPUs by FlexAttention, which skips blocks of tokens that see nothing of each other; on CPUs, where
    that has no backward pass, by branches of the tree.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    # one for all layers; the number of tokens is dynamic from the second one that is seen
    _compiled: ClassVar[Callable[..., Tensor]] = torch.compile(flex_attention)

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)

    # A break in a compiled layer: what a stream looks like changes with every batch. The argument names are
    # torchtitan's: its sharding rules refer to them.
    @torch.compiler.disable(recursive=False)  # FlexAttention, in it, is compiled
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Layout,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """q [1, Sq, N, H], k and v [1, S, KV, H] -> [1, Sq, N, H]; Sq is S, or the length of the layout's
        `queries`."""
        q, k, v = (x[0] for x in (q_BLNH, k_BLNH, v_BLNH))
        scale = float(q.shape[-1] ** -0.5) if scale is None else scale
        if q.device.type == "cpu":
            return _attend_by_branches(q, k, v, attention_masks, scale)[None]  # pyright: ignore[reportCallIssue]
        attended = TreeAttention._compiled(
            *(x.transpose(0, 1)[None] for x in (q, k, v)),
            block_mask=attention_masks.block_mask,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return attended.transpose(1, 2)


@torch.compiler.disable
def _attend_by_branches(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    return BranchAttention.apply(q, k, v, layout.branches, scale)  # pyright: ignore[reportReturnType]


class BranchAttention(torch.autograd.Function):
    """Attention by plain matrix products, batch by batch; the probabilities are computed again backward.

    On the CPU and branches of some hundred tokens several times as fast as torch's fused kernel in bfloat16,
    and it keeps no more. Heads that share keys are laid behind each other, so that no key is repeated.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        branches: Branches,
        scale: float,
    ) -> Tensor:
        """q [Sq, N, H], k and v [S, KV, H] -> [Sq, N, H]."""
        ctx.save_for_backward(q, k, v)
        ctx.branches, ctx.scale = branches, scale  # type: ignore[attr-defined]
        parts = []
        for batch in branches.batches:
            queries, keys, values = _queries(q, batch, k.shape[1]), _keys(k, batch), _keys(v, batch)
            attended = torch.bmm(_probabilities(queries, keys, batch, scale), values)
            parts.append(_tokens_first(attended, *batch.queries.shape))
        return torch.cat(parts).index_select(0, branches.order)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors  # type: ignore[attr-defined]
        branches: Branches = ctx.branches  # type: ignore[attr-defined]
        scale: float = ctx.scale  # type: ignore[attr-defined]
        parts = []
        # summed in float32: a prompt's keys stand in many branches
        grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
        for batch in branches.batches:
            queries, keys, values = _queries(q, batch, k.shape[1]), _keys(k, batch), _keys(v, batch)
            # 0 in the padding: whatever is computed there then counts for nothing
            part = _queries(grad, batch, k.shape[1], batch.queries.flatten() >= 0)
            p = _probabilities(queries, keys, batch, scale)
            _add(grad_v, torch.bmm(p.transpose(1, 2), part), batch)
            grad_p = torch.bmm(part, values.transpose(1, 2))
            grad_scores = torch.ops.aten._softmax_backward_data(grad_p, p, -1, p.dtype).mul_(scale)
            _add(grad_k, torch.bmm(grad_scores.transpose(1, 2), queries), batch)
            parts.append(_tokens_first(torch.bmm(grad_scores, keys), *batch.queries.shape))
        grad_q = torch.cat(parts).index_select(0, branches.order)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _probabilities(queries: Tensor, keys: Tensor, batch: BranchBatch, scale: float) -> Tensor:
    """[n * KV, G * Lq, Lk]."""
    # `out`: selective activation checkpointing keeps what other products return, and it is written over
    scores = queries.new_empty(len(queries), queries.shape[1], keys.shape[1])
    torch.bmm(queries * scale, keys.transpose(1, 2), out=scores)
    by_branch = scores.view(len(batch.keys), -1, batch.queries.shape[1], batch.keys.shape[1])
    by_branch += batch.bias(scores.dtype)
    return torch.softmax(scores, dim=-1)


def _queries(x: Tensor, batch: BranchBatch, num_kv_heads: int, kept: Tensor | None = None) -> Tensor:
    """x [Sq, KV * G, H] at the queries of a batch -> [n * KV, G * Lq, H], 0 where not `kept` [n * Lq]."""
    chosen = x.index_select(0, batch.query_places)
    if kept is not None:
        chosen *= kept[:, None, None]
    num, length = batch.queries.shape
    return chosen.view(num, length, *x.shape[1:]).transpose(1, 2).reshape(num * num_kv_heads, -1, x.shape[2])


def _keys(x: Tensor, batch: BranchBatch) -> Tensor:
    """x [S, KV, H] at the keys of a batch -> [n * KV, Lk, H]; the bias hides the padding."""
    chosen = x.index_select(0, batch.key_places)
    return chosen.view(*batch.keys.shape, *x.shape[1:]).transpose(1, 2).flatten(0, 1)


def _tokens_first(x: Tensor, num: int, length: int) -> Tensor:
    """[n * KV, G * L, H] -> [n * L, KV * G, H]."""
    return x.view(num, -1, length, x.shape[-1]).transpose(1, 2).flatten(0, 1)


def _add(total: Tensor, parts: Tensor, batch: BranchBatch) -> None:
    """Adds gradients [n * KV, Lk, H] of a batch's keys to those of all, [S, KV, H]; the padding's are 0."""
    total.index_add_(0, batch.key_places, _tokens_first(parts, *batch.keys.shape).float())
