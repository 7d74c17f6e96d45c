"""A batch as one stream of tokens without padding, and which of them attend to which."""

from dataclasses import dataclass
from functools import cached_property

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from forge.actors.trainer.branches import Branches
from forge.actors.trainer.tree_blocks import tree_block_mask
from forge.data_models import TrainInputs


@dataclass(frozen=True, slots=True)
class Stream:
    """The tokens that count of B rows of L cells, row behind row: S of them, padding at the end included."""

    tokens: Tensor  # [S] int64, 0 where padding
    positions: Tensor  # [S] int64, 0 where padding
    row_ids: Tensor  # [S] int64, -1 where padding
    segment_ids: Tensor  # [S] int64, -1 where padding
    token_of_cell: Tensor  # [B * L]: where the cell row * L + column stands; of padding, a token before it


def stream_of(inputs: TrainInputs, multiple: int = 1) -> Stream:
    """The rows of a batch laid behind each other, S padded up to a multiple, and never 0."""
    real = inputs.segment_ids.flatten() >= 0
    cells = real.nonzero().squeeze(1)
    num_padding = -len(cells) % multiple if len(cells) else multiple

    def chosen(values: Tensor, fill: int) -> Tensor:
        return F.pad(values.flatten()[cells], (0, num_padding), value=fill)

    return Stream(
        tokens=chosen(inputs.input_ids, 0),
        positions=chosen(inputs.positions, 0),
        row_ids=F.pad(cells // inputs.segment_ids.shape[1], (0, num_padding), value=-1),
        segment_ids=chosen(inputs.segment_ids, -1),
        token_of_cell=(real.cumsum(0) - 1).clamp_(min=0),
    )


@dataclass(frozen=True)
class Layout:
    """What the tokens of a stream attend to: a tree for each row.

    A token attends to itself and to earlier tokens of its row, those of the prompt (segment 0) and of its own
    segment. A token of no row (-1) is padding and attends to itself only.
    """

    row_ids: Tensor  # [S] int64
    segment_ids: Tensor  # [S] int64
    queries: slice | None = None  # of the stream: whose results are computed here; None: all

    @property
    def query_range(self) -> tuple[int, int]:
        """First token whose result is computed, and the one behind the last."""
        start, stop, _ = (self.queries or slice(None)).indices(len(self.row_ids))
        return start, stop

    @cached_property
    def branches(self) -> Branches:
        """The tree, cut into parts that are dense, for the CPU."""
        return Branches.of(self.row_ids, self.segment_ids, *self.query_range)

    @cached_property
    def block_mask(self) -> BlockMask:
        """The tree over blocks of tokens, for FlexAttention."""
        return tree_block_mask(self.row_ids, self.segment_ids, *self.query_range)
