"""A tree of tokens cut into branches, within which attention is dense: no product is computed in vain."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

MAX_WASTE = 1.25
"""Cells that a batch of branches may have for each that counts."""
FREE_CELLS = 2**14
"""Cells that cost about what one batch more would cost."""


@dataclass(frozen=True)
class Branch:
    """The tokens of one segment, and all that any of them attends to: the prompt and the segment itself."""

    queries: Tensor  # [Lq] int64, numbers of tokens, ascending
    keys: Tensor  # [Lk] int64, ascending

    @property
    def num_cells(self) -> int:
        return len(self.queries) * len(self.keys)


@dataclass(frozen=True)
class BranchBatch:
    """n branches of similar lengths, padded to Lq queries and Lk keys."""

    queries: Tensor  # [n, Lq] int64, numbers of tokens among the queries, 0 in the padding
    keys: Tensor  # [n, Lk] int64, numbers of tokens, 0 in the padding
    bias: Tensor  # [n, 1, Lq, Lk] float32: 0 where a query attends to a key, else -inf
    cells: Tensor  # [M]: the cells of `queries` that are no padding
    is_causal: bool  # whether the bias says no more than "earlier cells"

    @classmethod
    def of(cls, branches: Sequence[Branch], first_query: int) -> "BranchBatch":
        """`first_query`: the token that is query 0."""
        queries = pad_sequence([b.queries for b in branches], batch_first=True, padding_value=-1)
        keys = pad_sequence([b.keys for b in branches], batch_first=True, padding_value=-1)
        real = queries.flatten() >= 0
        visible = (keys[:, None] <= queries[:, :, None]) & (keys >= 0)[:, None]
        visible[:, :, 0] |= queries < 0  # what attends to nothing is not a number
        bias = torch.zeros(visible.shape, device=keys.device).masked_fill_(~visible, -torch.inf)
        return cls(
            queries=torch.where(queries >= 0, queries - first_query, 0),
            keys=keys.clamp(min=0),
            bias=bias[:, None],
            cells=real.nonzero().squeeze(1),
            is_causal=all(torch.equal(b.queries, b.keys) for b in branches),
        )

    @classmethod
    def of_padding(cls, tokens: Tensor, first_query: int) -> "BranchBatch":
        """Tokens [M] that attend to nothing but themselves."""
        return cls(
            queries=(tokens - first_query)[:, None],
            keys=tokens[:, None],
            bias=torch.zeros(len(tokens), 1, 1, 1, device=tokens.device),
            cells=torch.arange(len(tokens), device=tokens.device),
            is_causal=True,
        )

    @cached_property
    def tokens(self) -> Tensor:
        """[M]: the queries that are no padding, in the order of the cells."""
        return self.queries.flatten()[self.cells]


@dataclass(frozen=True)
class Branches:
    """All branches of a stream whose queries are computed here."""

    batches: list[BranchBatch]

    @classmethod
    def of(cls, row_ids: Tensor, segment_ids: Tensor, start: int, stop: int) -> "Branches":
        """row_ids, segment_ids [S]; the queries are the tokens from `start` to `stop`."""
        found = sorted(
            _branches(row_ids, segment_ids, start, stop), key=lambda b: (len(b.keys), len(b.queries))
        )
        batches: list[list[Branch]] = []
        for branch in found:
            if not batches or not _fits(batches[-1], branch):
                batches.append([])
            batches[-1].append(branch)
        padding = (row_ids[start:stop] < 0).nonzero().squeeze(1) + start
        last = [BranchBatch.of_padding(padding, start)] if len(padding) else []
        return cls([*(BranchBatch.of(batch, start) for batch in batches), *last])


def _branches(row_ids: Tensor, segment_ids: Tensor, start: int, stop: int) -> list[Branch]:
    segments = segment_ids + row_ids * (int(segment_ids.max()) + 2)  # a number for each segment of each row
    order = segments.argsort(stable=True)
    order = order[row_ids[order] >= 0]
    _, sizes = segments[order].unique_consecutive(return_counts=True)
    prompts: dict[int, Tensor] = {}
    branches = []
    for tokens in order.split(sizes.tolist()):
        row, segment = int(row_ids[tokens[0]]), int(segment_ids[tokens[0]])
        if segment == 0:
            prompts[row] = tokens
        keys = tokens if segment == 0 or row not in prompts else torch.cat([prompts[row], tokens]).sort()[0]
        queries = tokens[(tokens >= start) & (tokens < stop)]
        if len(queries):
            branches.append(Branch(queries, keys[keys <= queries[-1]]))
    return branches


def _fits(batch: Sequence[Branch], branch: Branch) -> bool:
    together = [*batch, branch]
    most = len(together) * max(len(b.queries) for b in together) * max(len(b.keys) for b in together)
    return most <= MAX_WASTE * sum(b.num_cells for b in together) + FREE_CELLS
