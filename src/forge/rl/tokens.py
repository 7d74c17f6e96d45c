"""A batch token by token: what each contributes to the loss, as rows to read."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from forge.data_models import TrainTargets
from forge.rl.loss import Loss, PolicyLoss

COLUMNS = (
    *("update", "episode", "token", "text", "advantage"),
    *("generator", "trainer", "reference", "ratio", "term"),
)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token of an update. Log-probabilities in nats."""

    update: int  # of the step, from 1
    episode: str
    position: int  # in its completion, from 0
    text: str
    advantage: float
    generator_logprob: float
    trainer_logprob: float  # as this update begins
    ref_logprob: float | None
    # What the loss makes of it, the ratio to the generator's policy or the proximal one; None where it is no
    # PolicyLoss, and does not tell.
    ratio: float | None
    term: float | None


def token_rows(
    loss: Loss,
    targets: Sequence[TrainTargets],
    logprobs: Sequence[Tensor],
    decode: Callable[[int], str],
    *,
    update: int = 1,
) -> Iterator[TokenRow]:
    """The unmasked tokens of every data-parallel rank's targets, in their order.

    logprobs: the trainer's of each rank [N, T], as the update begins. decode: the text of a token id. A mean
    of the terms weighed as the loss averages is the loss, but for an entropy bonus.
    """
    for given, now in zip(targets, logprobs, strict=True):
        ratio, term = _terms(loss, given, now)
        for i, j in given.loss_mask.bool().nonzero().tolist():
            advantage = given.advantages[i] if given.advantages.dim() == 1 else given.advantages[i, j]
            yield TokenRow(
                update=update,
                episode=given.episode_ids[i] if given.episode_ids else str(i),
                position=j,
                text=decode(int(given.target_ids[i, j])),
                advantage=float(advantage),
                generator_logprob=float(given.generator_logprobs[i, j]),
                trainer_logprob=float(now[i, j]),
                ref_logprob=_at(given.ref_logprobs, i, j),
                ratio=_at(ratio, i, j),
                term=_at(term, i, j),
            )


def table(rows: Sequence[TokenRow]) -> str:
    """The rows as text, in columns."""
    cells = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    lines = ["  ".join(_justified(i, cell, widths[i]) for i, cell in enumerate(line)) for line in cells]
    return "\n".join(line.rstrip() for line in lines)


def _cells(row: TokenRow) -> tuple[str, ...]:
    logprobs = (row.generator_logprob, row.trainer_logprob, row.ref_logprob)
    numbers = (row.advantage, *logprobs, row.ratio, row.term)
    texts = ("-" if number is None else f"{number:.5f}" for number in numbers)
    return (str(row.update), row.episode, str(row.position), repr(row.text), *texts)


def _justified(column: int, cell: str, width: int) -> str:
    return cell.ljust(width) if column in (1, 3) else cell.rjust(width)


def _terms(loss: Loss, given: TrainTargets, now: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if not isinstance(loss, PolicyLoss):
        return None, None
    return loss.terms(
        now,
        given.advantages,
        given.generator_logprobs,
        given.loss_mask,
        given.ref_logprobs,
        given.proximal_logprobs,
    )


def _at(values: Tensor | None, i: int, j: int) -> float | None:
    return None if values is None else float(values[i, j])
