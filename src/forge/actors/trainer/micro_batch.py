"""A step's data cut into micro-batches, and what each of them weighs."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor

from forge.data_models import TextTrainBatch, TrainInputs, TrainTargets
from forge.errors import ForgeError

MicroBatch = tuple[TrainInputs, TrainTargets]
Data = TypeVar("Data", TrainInputs, TrainTargets)
NormalizeBy = Literal["sequences", "tokens"]


def split_micro_batches(inputs: TrainInputs, targets: TrainTargets, n: int) -> list[MicroBatch]:
    """Cuts a batch along its rows into n parts whose row counts differ by at most one.

    Every completion goes with its row. Rows lose the padding that only longer rows of other parts needed; the
    T of the targets stays, since losses may divide by it. Raises ForgeError for more parts than rows.
    """
    num_rows, length = inputs.input_ids.shape
    if not 1 <= n <= num_rows:
        raise ForgeError(f"a batch of {num_rows} rows can't be cut into {n} micro-batches")
    if n == 1:
        return [(inputs, targets)]
    row_of = (targets.source_ids // length).amax(-1)  # masked places say 0, a completion has one row
    return [_part(inputs, targets, rows, row_of) for rows in torch.arange(num_rows).tensor_split(n)]


def _part(inputs: TrainInputs, targets: TrainTargets, rows: Tensor, row_of: Tensor) -> MicroBatch:
    start, stop = int(rows[0]), int(rows[-1]) + 1
    old_length = inputs.input_ids.shape[1]
    filled = (inputs.segment_ids[start:stop] >= 0).any(0).nonzero()
    length = int(filled.max()) + 1 if len(filled) else 1
    chosen = (row_of >= start) & (row_of < stop)
    old = targets.source_ids[chosen]
    new = (old // old_length - start) * length + old % old_length
    mask = targets.loss_mask[chosen]
    ref_logprobs = targets.ref_logprobs
    return (
        TrainInputs(
            input_ids=inputs.input_ids[start:stop, :length],
            positions=inputs.positions[start:stop, :length],
            segment_ids=inputs.segment_ids[start:stop, :length],
        ),
        TrainTargets(
            source_ids=torch.where(mask, new, 0),
            target_ids=targets.target_ids[chosen],
            loss_mask=mask,
            advantages=targets.advantages[chosen],
            generator_logprobs=targets.generator_logprobs[chosen],
            ref_logprobs=None if ref_logprobs is None else ref_logprobs[chosen],
            temperature=targets.temperature,
            episode_ids=[
                name for name, keep in zip(targets.episode_ids, chosen.tolist(), strict=False) if keep
            ],
        ),
    )


def count(targets: TrainTargets, normalize_by: NormalizeBy) -> int:
    """What a loss averages over: sequences with any target, or unmasked tokens."""
    unmasked = targets.loss_mask.bool()
    return int(unmasked.any(-1).sum() if normalize_by == "sequences" else unmasked.sum())


def from_text(batch: TextTrainBatch) -> MicroBatch:
    """Plain text as rows of one segment each. Tokens behind a row's last target are dropped."""
    num_rows, length = batch.input_ids.shape
    columns = torch.arange(length)
    mask = batch.target_mask.bool()
    last = torch.where(mask, columns, -1).amax(-1, keepdim=True)
    cells = torch.arange(num_rows)[:, None] * length + columns
    inputs = TrainInputs(
        input_ids=batch.input_ids,
        positions=columns.expand(num_rows, length).contiguous(),
        segment_ids=torch.where(columns <= last, 0, -1),
    )
    targets = TrainTargets(
        source_ids=torch.where(mask, cells, 0),
        target_ids=batch.target_ids,
        loss_mask=mask,
        advantages=batch.target_weights,
        generator_logprobs=torch.zeros_like(batch.target_weights),
    )
    return inputs, targets


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The same with every tensor on `device`."""
    inputs, targets = batch
    return _moved(inputs, device), _moved(targets, device)


def _moved(data: Data, device: torch.device) -> Data:
    tensors = {
        field.name: value.to(device)
        for field in dataclasses.fields(data)
        if isinstance(value := getattr(data, field.name), Tensor)
    }
    return dataclasses.replace(data, **tensors)


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
    for values in (targets.advantages, targets.generator_logprobs, targets.ref_logprobs):
        if values is not None:
            finite = values.isfinite().cpu()
            bad |= ~finite if finite.dim() == 1 else (~finite & targets.loss_mask.cpu().bool()).any(-1)
    return bad.tolist()
