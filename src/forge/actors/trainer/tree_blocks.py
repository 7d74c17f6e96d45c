"""The tree of a stream as blocks of tokens, for FlexAttention: which count, which need no mask."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Tokens of a block, FlexAttention's own size."""


def tree_block_mask(row_ids: Tensor, segment_ids: Tensor, start: int, stop: int) -> BlockMask:
    """row_ids, segment_ids [S] (see Layout); the queries are the tokens from `start` to `stop`.

    Nothing of size S x S is made: blocks are compared by the rows and segments that they hold.
    """
    offset = torch.tensor(start, device=row_ids.device)  # a number would be compiled in

    def attends(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        query = q_idx + offset
        same_row = (row_ids[query] == row_ids[kv_idx]) & (row_ids[query] >= 0)
        segment = segment_ids[kv_idx]
        visible = same_row & ((segment == 0) | (segment == segment_ids[query])) & (kv_idx <= query)
        return visible | (kv_idx == query)

    partial, full = tree_blocks(row_ids, segment_ids, start, stop)
    return BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=attends,
        seq_lengths=(stop - start, len(row_ids)),
    )


def tree_blocks(row_ids: Tensor, segment_ids: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Blocks [query blocks, key blocks] in which some pairs of tokens attend, and those in which all do."""
    keys = _Blocks(row_ids, segment_ids, row_ids, segment_ids)
    queries = _Blocks(row_ids[start:stop], segment_ids[start:stop], row_ids, segment_ids)
    first_q, last_q = queries.first + start, queries.last + start
    earlier = keys.first <= last_q[:, None]
    meets = (queries.segments @ keys.segments.T + queries.rows @ keys.prompts.T) > 0
    same_row = queries.has_one_row[:, None] & keys.has_one_row & (queries.row[:, None] == keys.row)
    same_segment = keys.has_one_segment & (
        (keys.segment == 0) | (queries.has_one_segment[:, None] & (queries.segment[:, None] == keys.segment))
    )
    wholly_earlier = keys.last <= first_q[:, None]
    full = same_row & same_segment & wholly_earlier & queries.is_whole[:, None] & keys.is_whole
    itself = (keys.first <= last_q[:, None]) & (keys.last >= first_q[:, None])  # padding attends to itself
    return ((meets & earlier) | itself) & ~full, full


class _Blocks:
    """What blocks of some tokens hold. Padding tokens count to no row."""

    def __init__(self, row_ids: Tensor, segment_ids: Tensor, all_rows: Tensor, all_segments: Tensor) -> None:
        num = -(-len(row_ids) // BLOCK)
        self.first = torch.arange(num, device=row_ids.device) * BLOCK
        self.last = (self.first + BLOCK - 1).clamp(max=len(row_ids) - 1)
        self.is_whole = self.last - self.first == BLOCK - 1
        rows = F.pad(row_ids, (0, num * BLOCK - len(row_ids)), value=-1).view(num, BLOCK)
        segments = F.pad(segment_ids, (0, num * BLOCK - len(row_ids)), value=-1).view(num, BLOCK)
        self.row, self.segment = rows[:, 0], segments[:, 0]
        self.has_one_row = ((rows == rows[:, :1]) & (rows >= 0)).all(1)
        self.has_one_segment = self.has_one_row & (segments == segments[:, :1]).all(1)
        num_rows, num_segments = int(all_rows.max()) + 1, int(all_segments.max()) + 1
        self.rows = _holds(rows, rows >= 0, num_rows)
        self.prompts = _holds(rows, (rows >= 0) & (segments == 0), num_rows)
        self.segments = _holds(rows * num_segments + segments, rows >= 0, num_rows * num_segments)


def _holds(numbers: Tensor, chosen: Tensor, count: int) -> Tensor:
    """numbers [blocks, BLOCK] below `count` -> [blocks, count] float32: 1 where it holds a chosen one."""
    found = torch.zeros(len(numbers), count + 1, device=numbers.device)
    return found.scatter_(1, torch.where(chosen, numbers, count), 1.0)[:, :count]


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [query blocks, key blocks] -> how many each query block has, and their numbers first."""
    counts = blocks.sum(1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], order[None, None]
