"""What a model is fed: batches as streams of one length, and of each the tokens that this process has."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.actors.trainer.layout import Stream, stream_of
from forge.actors.trainer.micro_batch import MicroBatch
from forge.data_models import TrainInputs


@dataclass(frozen=True, slots=True)
class Query:
    """A batch, and the places where the model is asked what follows."""

    inputs: TrainInputs
    source_ids: Tensor  # [M]: cells, row * L + column


def queries_of(batches: Sequence[MicroBatch]) -> list[Query]:
    """What the model is asked for the unmasked targets of each batch, in their order."""
    return [Query(inputs, targets.source_ids[targets.loss_mask.bool()]) for inputs, targets in batches]


@dataclass(frozen=True, slots=True)
class Feed:
    """n streams of S tokens, of which this process has those from `start` to `stop`, Sq of them."""

    tokens: Tensor  # [n, Sq]
    positions: Tensor  # [n, Sq]
    row_ids: Tensor  # [n, S]
    segment_ids: Tensor  # [n, S]
    source_ids: list[Tensor]  # of each query [M]: tokens of its stream
    start: int
    stop: int

    @property
    def masks(self) -> dict[str, Tensor]:
        """What the model's parts take beside tokens or hidden states."""
        return {"positions": self.positions, "row_ids": self.row_ids, "segment_ids": self.segment_ids}

    def own(self, i: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [1, Sq, D] of stream i -> those that are asked about here, one at least, and which of the M
        they are."""
        if i >= len(self.source_ids):  # a stream of padding
            return hidden[0, :1], self.row_ids.new_zeros(0)
        sources = self.source_ids[i]
        places = ((sources >= self.start) & (sources < self.stop)).nonzero().squeeze(1)
        if not len(places):
            return hidden[0, :1], places
        return hidden[0].index_select(0, sources[places] - self.start), places


def feed_of(queries: Sequence[Query], *, num_streams: int = 0, part: int = 0, num_parts: int = 1) -> Feed:
    """Each batch as a stream, padded to the longest, and streams of padding up to `num_streams`.

    Of `num_parts` equal parts of every stream, this process has number `part`.
    """
    lengths = [int((query.inputs.segment_ids >= 0).sum()) for query in queries]
    length = -(-max(*lengths, 1) // num_parts) * num_parts
    streams = [stream_of(query.inputs, length) for query in queries]
    start, stop = part * length // num_parts, (part + 1) * length // num_parts
    missing = max(0, num_streams - len(queries))

    def stacked(name: str, fill: int) -> Tensor:
        return F.pad(torch.stack([getattr(s, name) for s in streams]), (0, 0, 0, missing), value=fill)

    return Feed(
        tokens=stacked("tokens", 0)[:, start:stop],
        positions=stacked("positions", 0)[:, start:stop],
        row_ids=stacked("row_ids", -1),
        segment_ids=stacked("segment_ids", -1),
        source_ids=[_sources(s, q) for s, q in zip(streams, queries, strict=True)],
        start=start,
        stop=stop,
    )


def _sources(stream: Stream, query: Query) -> Tensor:
    return stream.token_of_cell[query.source_ids]
