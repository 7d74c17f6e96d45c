"""A tree of tokens cut into branches, within which attention is dense: little is computed in vain."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

MAX_QUERIES = 256
"""Tokens of a branch: a longer one is cut, since the first of its tokens see few of its keys."""
KEY_CELLS = 32
"""Cells (a query with a key) that cost about what one key does that stands in one branch more."""
BRANCH_CELLS = 2**9
"""Cells that cost about what one branch more would cost."""
BATCH_CELLS = 2**13
"""Cells that cost about what one batch more would cost."""
MAX_WASTE = 1.25
"""Cells that a batch of branches may have for each that counts."""
MAX_CELLS = 2**18
"""Of a batch of several branches: more at once saves no time, and takes memory."""


@dataclass(frozen=True)
class Branch:
    """Tokens of one row, and all that any of them attends to: of the prompt and of their own segments."""

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
    hidden: Tensor  # [n, Lq, Lk] bool: where a query does not attend to a key
    first_query: int  # the token that is query 0
    _biases: dict[torch.dtype, Tensor] = field(default_factory=dict)
    query_places: Tensor = field(init=False)  # [n * Lq]: numbers of queries, 0 in the padding
    key_places: Tensor = field(init=False)  # [n * Lk]: numbers of tokens, 0 in the padding

    def __post_init__(self) -> None:
        query_places = (self.queries.flatten() - self.first_query).clamp_(min=0)
        object.__setattr__(self, "query_places", query_places)
        object.__setattr__(self, "key_places", self.keys.flatten().clamp(min=0))

    @classmethod
    def of(cls, branches: Sequence[Branch], segment_ids: Tensor, first_query: int) -> "BranchBatch":
        """segment_ids [S] of all tokens."""
        queries, keys = (
            pad_sequence(list(tokens), batch_first=True, padding_value=-1)
            for tokens in zip(*((b.queries, b.keys) for b in branches), strict=True)
        )
        segments = segment_ids[keys.clamp(min=0)][:, None]
        strange = (segments != 0) & (segments != segment_ids[queries.clamp(min=0)][:, :, None])
        hidden = strange | (keys[:, None] > queries[:, :, None]) | (keys < 0)[:, None]
        hidden[:, :, 0] &= queries >= 0  # what attends to nothing would not be a number
        return cls(queries, keys, hidden, first_query)

    @classmethod
    def of_padding(cls, tokens: Tensor, first_query: int) -> "BranchBatch":
        """Tokens [M] that attend to nothing but themselves."""
        hidden = torch.zeros(len(tokens), 1, 1, dtype=torch.bool, device=tokens.device)
        return cls(tokens[:, None], tokens[:, None], hidden, first_query)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """[n, 1, Lq, Lk]: 0 where a query attends to a key, else -inf."""
        if dtype not in self._biases:
            bias = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device)
            self._biases[dtype] = bias.masked_fill_(self.hidden, -torch.inf)[:, None]
        return self._biases[dtype]


@dataclass(frozen=True)
class Branches:
    """All branches of a stream whose queries are computed here."""

    batches: list[BranchBatch]
    order: Tensor  # [Sq]: where each query stands among the queries of all batches, padding counted

    @classmethod
    def of(cls, row_ids: Tensor, segment_ids: Tensor, start: int, stop: int) -> "Branches":
        """row_ids, segment_ids [S]; the queries are the tokens from `start` to `stop`."""
        found = list(_branches(row_ids, segment_ids, start, stop))
        batches = [BranchBatch.of(some, segment_ids, start) for some in _batched(found)]
        padding = (row_ids[start:stop] < 0).nonzero().squeeze(1) + start
        if len(padding):
            batches.append(BranchBatch.of_padding(padding, start))
        tokens = torch.cat([batch.queries.flatten() for batch in batches])
        places = (tokens >= 0).nonzero().squeeze(1)
        return cls(batches, places[tokens[places].argsort()])


def _branches(row_ids: Tensor, segment_ids: Tensor, start: int, stop: int) -> Iterator[Branch]:
    for prompt, completions in _rows(row_ids, segment_ids):
        for tokens in _merged(prompt, completions):
            queries = tokens[(tokens >= start) & (tokens < stop)].sort()[0]
            if len(queries):
                keys = torch.cat([prompt, tokens]).unique()
                for some in queries.split(MAX_QUERIES):
                    yield Branch(some, keys[keys <= some[-1]])


def _rows(row_ids: Tensor, segment_ids: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Numbers of the tokens of each row: the prompt's, which may be none, and those of each completion."""
    numbers = segment_ids + row_ids * (int(segment_ids.max()) + 2)  # one for each segment of each row
    order = numbers.argsort(stable=True)
    order = order[row_ids[order] >= 0]
    _, sizes = numbers[order].unique_consecutive(return_counts=True)
    rows: dict[int, tuple[Tensor, list[Tensor]]] = {}
    for tokens in order.split(sizes.tolist()):
        row, is_prompt = int(row_ids[tokens[0]]), int(segment_ids[tokens[0]]) == 0
        if row not in rows:
            rows[row] = (tokens if is_prompt else tokens[:0], [])
        if not is_prompt:
            rows[row][1].append(tokens)
    yield from rows.values()


def _merged(prompt: Tensor, completions: Sequence[Tensor]) -> list[Tensor]:
    """The segments of a row, those put together which cost less at once, though some cells then count for
    nothing: those of one completion's queries with another's keys."""
    saved = KEY_CELLS * len(prompt) + BRANCH_CELLS  # with every branch less
    groups: list[list[Tensor]] = []
    sizes: list[int] = []
    for tokens in completions:
        if groups and 2 * sizes[-1] * len(tokens) < saved:
            groups[-1].append(tokens)
            sizes[-1] += len(tokens)
        else:
            groups.append([tokens])
            sizes.append(len(tokens))
    if not len(prompt):
        return [torch.cat(group) for group in groups]
    if groups and len(prompt) * sizes[0] < saved:
        return [torch.cat([prompt, *groups[0]]), *(torch.cat(group) for group in groups[1:])]
    return [prompt, *(torch.cat(group) for group in groups)]


def _batched(branches: Sequence[Branch]) -> list[list[Branch]]:
    """The cheaper of two ways: neighbours by keys, or by queries."""
    by_keys = _in_order(sorted(branches, key=lambda b: (len(b.keys), len(b.queries))))
    by_queries = _in_order(sorted(branches, key=lambda b: (len(b.queries), len(b.keys))))
    return min(by_keys, by_queries, key=lambda batches: sum(BATCH_CELLS + _cells(b) for b in batches))


def _in_order(branches: Sequence[Branch]) -> list[list[Branch]]:
    batches: list[list[Branch]] = []
    for branch in branches:
        if not batches or not _fits(batches[-1], branch):
            batches.append([])
        batches[-1].append(branch)
    return batches


def _fits(batch: Sequence[Branch], branch: Branch) -> bool:
    together = [*batch, branch]
    cells = _cells(together)
    waste = cells - sum(b.num_cells for b in together)
    return cells <= MAX_CELLS and waste <= (MAX_WASTE - 1) * cells / MAX_WASTE + BATCH_CELLS


def _cells(batch: Sequence[Branch]) -> int:
    """Of a batch, padding counted."""
    return len(batch) * max(len(b.queries) for b in batch) * max(len(b.keys) for b in batch)
