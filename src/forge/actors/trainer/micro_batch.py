"""A step's data cut into micro-batches, and what each of them weighs."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.data_models import TextTrainBatch, TrainInputs, TrainTargets
from forge.rl.balance import fill_evenly

MicroBatch = tuple[TrainInputs, TrainTargets]
Data = TypeVar("Data", TrainInputs, TrainTargets)
NormalizeBy = Literal["sequences", "tokens"]


def plan_passes(
    batches: Sequence[MicroBatch], at_least: int = 1, max_tokens: int | None = None
) -> list[list[list[int]]]:
    """Every rank's batch -> the rows of each of its passes; all have as many, as sharded passes need.

    A pass has `max_tokens` tokens at most, or a single row; there are no fewer than `at_least` passes where a
    rank has that many rows, and otherwise as few as possible. Their tokens are about equal, the longest pass
    is the first. A rank with fewer rows than passes gets empty ones, which it must run like the others.
    """
    sizes = [(inputs.segment_ids >= 0).sum(1).tolist() for inputs, _ in batches]
    most = max(len(rows) for rows in sizes)
    n = max(1, min(at_least, most))
    if max_tokens is not None:
        needed = max(-(-sum(rows) // max_tokens) for rows in sizes)
        n = max(n, min(needed, most))  # a pass has a row at least
    plans = [fill_evenly(rows, n) for rows in sizes]
    while max_tokens is not None and n < most and _exceed(sizes, plans, max_tokens):
        n += 1
        plans = [fill_evenly(rows, n) for rows in sizes]
    return plans


def with_equal_lengths(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Every rank's batch with its targets padded to the largest T of all ranks, so that a loss that divides
    by T is the same however the sequences are shared out."""
    longest = max(targets.loss_mask.shape[1] for _, targets in batches)
    return [(inputs, _padded(targets, longest)) for inputs, targets in batches]


def _padded(targets: TrainTargets, length: int) -> TrainTargets:
    missing = length - targets.loss_mask.shape[1]
    if not missing:
        return targets
    tensors = {
        name: F.pad(values, (0, missing)) for name, values in _tensors(targets).items() if values.dim() == 2
    }
    return dataclasses.replace(targets, **tensors)


def _exceed(sizes: list[list[int]], plans: list[list[list[int]]], max_tokens: int) -> bool:
    return any(
        len(rows) > 1 and sum(of_rank[row] for row in rows) > max_tokens
        for of_rank, plan in zip(sizes, plans, strict=True)
        for rows in plan
    )


def part_of(batch: MicroBatch, row_numbers: Sequence[int]) -> MicroBatch:
    """Some rows, without the padding that only others needed, and their completions. The T of the targets
    stays, since losses may divide by it."""
    inputs, targets = batch
    num_rows, old_length = inputs.input_ids.shape
    if len(row_numbers) == num_rows:
        return batch
    rows = torch.tensor(row_numbers, dtype=torch.long)
    chosen = completions_in(batch, row_numbers)
    filled = (inputs.segment_ids[rows] >= 0).any(0).nonzero()
    length = int(filled.max()) + 1 if len(filled) else 1
    number = torch.full((num_rows,), -1).scatter_(0, rows, torch.arange(len(rows)))
    old = targets.source_ids[chosen]
    new = number[old // old_length] * length + old % old_length
    kept = {name: values[chosen] for name, values in _tensors(targets).items()}
    kept["source_ids"] = torch.where(kept["loss_mask"], new, 0)
    lists = {name: list(compress(values, chosen.tolist())) for name, values in _lists(targets).items()}
    return (
        TrainInputs(
            input_ids=inputs.input_ids[rows, :length],
            positions=inputs.positions[rows, :length],
            segment_ids=inputs.segment_ids[rows, :length],
        ),
        dataclasses.replace(targets, **kept, **lists),
    )


def completions_in(batch: MicroBatch, row_numbers: Sequence[int]) -> Tensor:
    """[N] bool: the completions that stand in these rows."""
    inputs, targets = batch
    num_rows, length = inputs.input_ids.shape
    is_chosen = torch.zeros(num_rows, dtype=torch.bool)
    is_chosen[list(row_numbers)] = True
    return is_chosen[(targets.source_ids // length).amax(-1)]  # masked places say 0; one row has them all


def count(targets: TrainTargets, normalize_by: NormalizeBy) -> int:
    """What a loss averages over: sequences with any target, or unmasked tokens."""
    unmasked = targets.loss_mask.bool()
    return int(unmasked.any(-1).sum() if normalize_by == "sequences" else unmasked.sum())


@dataclass(frozen=True, slots=True)
class Shares:
    """What a micro-batch weighs in a batch of all ranks."""

    normalize_by: NormalizeBy
    total: int  # of what the loss averages over
    num_tokens: int

    @classmethod
    def of(cls, batches: Sequence[TrainTargets], normalize_by: NormalizeBy) -> "Shares":
        return cls(
            normalize_by,
            sum(count(targets, normalize_by) for targets in batches),
            sum(count(targets, "tokens") for targets in batches),
        )

    def weight(self, targets: TrainTargets) -> float:
        return count(targets, self.normalize_by) / self.total

    def token_weight(self, targets: TrainTargets) -> float:
        return count(targets, "tokens") / self.num_tokens


def from_text(batch: TextTrainBatch) -> MicroBatch:
    """Plain text as rows of one segment each. Tokens behind a row's last target are dropped."""
    num_rows, length = batch.input_ids.shape
    columns = torch.arange(length)
    mask = batch.target_mask.bool()
    last = torch.where(mask, columns, -1).amax(-1, keepdim=True)
    cells = torch.arange(num_rows)[:, None] * length + columns
    inputs = TrainInputs(
        input_ids=batch.input_ids,
        positions=torch.where(columns <= last, columns, 0),
        segment_ids=torch.where(columns <= last, 0, -1),
    )
    targets = TrainTargets(
        source_ids=torch.where(mask, cells, 0),
        target_ids=batch.target_ids,
        loss_mask=mask,
        advantages=batch.target_weights,
        generator_logprobs=torch.zeros_like(batch.target_weights),
        episode_ids=list(batch.episode_ids),
    )
    return inputs, targets


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The same with every tensor on `device`."""
    inputs, targets = batch
    return moved(inputs, device), moved(targets, device)


def moved(data: Data, device: torch.device) -> Data:
    """Inputs or targets with every tensor on `device`."""
    return dataclasses.replace(data, **{name: values.to(device) for name, values in _tensors(data).items()})


def _tensors(data: Data) -> dict[str, Tensor]:
    fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    return {name: value for name, value in fields.items() if isinstance(value, Tensor)}


def _lists(targets: TrainTargets) -> dict[str, list[Any]]:
    """What is named of each completion."""
    fields = {field.name: getattr(targets, field.name) for field in dataclasses.fields(targets)}
    return {name: value for name, value in fields.items() if isinstance(value, list)}


def suspects_among(targets: Sequence[TrainTargets]) -> list[str]:
    """Ids of the episodes whose own numbers are not finite; of all, when the numbers of all are."""
    suspects = [
        name for t in targets for name, bad in zip(t.episode_ids, _not_finite(t), strict=False) if bad
    ]
    return suspects or [name for t in targets for name in t.episode_ids]


def name_episodes(targets: Sequence[TrainTargets], limit: int = 8) -> str:
    """Those ids for an error message."""
    names = suspects_among(targets)
    if not names:
        return "of a batch without episode ids"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"of episode{'s' * (len(names) > 1)} {', '.join(names[:limit])}{more}"


def _not_finite(targets: TrainTargets) -> list[bool]:
    """[N]: whether a number that came with the sequence, masked ones aside, is NaN or infinite."""
    bad = torch.zeros(len(targets.target_ids), dtype=torch.bool)
    for values in _tensors(targets).values():
        finite = values.isfinite().cpu()
        bad |= ~finite if finite.dim() == 1 else (~finite & targets.loss_mask.cpu().bool()).any(-1)
    return bad.tolist()
