"""A tree of tokens cut into branches, within which attention is dense: little is computed in vain."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

MAX_QUERIES = 256
"""Tokens of a branch: a longer one is cut, since the first of its tokens see few of its keys."""
MAX_WASTE = 1.25
"""Cells that a batch of branches may have for each that counts."""
FREE_CELLS = 2**13
"""Cells that cost about what one batch more would cost."""
MAX_CELLS = 2**18
"""Of a batch of several branches: more at once saves no time, and takes memory."""


@dataclass(frozen=True)
class Branch:
    """Tokens of one segment, and all that any of them attends to: of the prompt and of the segment itself."""

    queries: Tensor  # [Lq] int64, numbers of tokens, ascending
    keys: Tensor  # [Lk] int64, ascending

    @property
    def num_cells(self) -> int:
        return len(self.queries) * len(self.keys)


@dataclass(frozen=True)
class BranchBatch:
    """n branches of similar lengths, padded to Lq queries and Lk keys."""

    queries: Tensor  # [n, Lq] int64, numbers of tokens, -1 in the padding
    keys: Tensor  # [n, Lk] int64, numbers of tokens, -1 in the padding
    _biases: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, branches: Sequence[Branch]) -> "BranchBatch":
        queries, keys = (
            pad_sequence(list(tokens), batch_first=True, padding_value=-1)
            for tokens in zip(*((b.queries, b.keys) for b in branches), strict=True)
        )
        return cls(queries, keys)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """[n, 1, Lq, Lk]: 0 where a query attends to a key, else -inf."""
        if dtype not in self._biases:
            hidden = (self.keys[:, None] > self.queries[:, :, None]) | (self.keys < 0)[:, None]
            hidden[:, :, 0] &= self.queries >= 0  # what attends to nothing would not be a number
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._biases[dtype] = bias.masked_fill_(hidden, -torch.inf)[:, None]
        return self._biases[dtype]


@dataclass(frozen=True)
class Branches:
    """All branches of a stream whose queries are computed here."""

    batches: list[BranchBatch]
    first_query: int  # the token that is query 0
    order: Tensor  # [Sq]: where each query stands among the queries of all batches, padding counted

    @classmethod
    def of(cls, row_ids: Tensor, segment_ids: Tensor, start: int, stop: int) -> "Branches":
        """row_ids, segment_ids [S]; the queries are the tokens from `start` to `stop`."""
        batches = [BranchBatch.of(b) for b in _batched(_branches(row_ids, segment_ids, start, stop))]
        padding = (row_ids[start:stop] < 0).nonzero() + start
        if len(padding):
            batches.append(BranchBatch(padding, padding))
        tokens = torch.cat([batch.queries.flatten() for batch in batches])
        places = (tokens >= 0).nonzero().squeeze(1)
        return cls(batches, start, places[tokens[places].argsort()])


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
        for some in queries.split(MAX_QUERIES) if len(queries) else ():
            branches.append(Branch(some, keys[keys <= some[-1]]))
    return branches


def _batched(branches: Sequence[Branch]) -> list[list[Branch]]:
    batches: list[list[Branch]] = []
    for branch in sorted(branches, key=lambda b: (len(b.keys), len(b.queries))):
        if not batches or not _fits(batches[-1], branch):
            batches.append([])
        batches[-1].append(branch)
    return batches


def _fits(batch: Sequence[Branch], branch: Branch) -> bool:
    together = [*batch, branch]
    cells = len(together) * max(len(b.queries) for b in together) * max(len(b.keys) for b in together)
    waste = cells - sum(b.num_cells for b in together)
    return cells <= MAX_CELLS and waste <= (MAX_WASTE - 1) * cells / MAX_WASTE + FREE_CELLS
