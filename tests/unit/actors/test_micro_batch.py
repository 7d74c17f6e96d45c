"""Cutting a batch, counting it, and turning text into rows."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch

from forge.actors.trainer.layout import stream_of
from forge.actors.trainer.loss_pass import as_floats, normalizer_of, token_means_of
from forge.actors.trainer.micro_batch import (
    MicroBatch,
    Shares,
    count,
    from_text,
    name_episodes,
    part_of,
    plan_passes,
    with_equal_lengths,
)
from forge.actors.trainer.tally import Tally
from forge.data_models import Completion, TextTrainBatch, TrainInputs, TrainTargets
from forge.rl.balance import fill_evenly
from forge.rl.collate import pack_completions
from forge.rl.loss import GRPOLoss, SFTLoss

LENGTHS = [[2, 3], [4], [1, 2, 5], [3]]  # of each row's completions
ROW_OF = [row for row, lengths in enumerate(LENGTHS) for _ in lengths]


def _batch(rows: Sequence[int] = range(len(LENGTHS))) -> tuple[TrainInputs, TrainTargets]:
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> torch.Tensor:
        return torch.randint(1, 100, (n,), generator=generator)

    groups = []
    for row, lengths in enumerate(LENGTHS):
        prompt = tokens(3 + row)
        groups.append([Completion("", tokens(n), -torch.ones(n), prompt_ids=prompt) for n in lengths])
    inputs, targets = pack_completions([groups[row] for row in rows])
    numbers = [i for row in rows for i, owner in enumerate(ROW_OF) if owner == row]
    return inputs, dataclasses.replace(
        targets,
        advantages=torch.tensor(numbers).float(),
        ref_logprobs=targets.generator_logprobs - 1,
        proximal_logprobs=targets.generator_logprobs - 2,
        episode_ids=[f"e{i}" for i in numbers],
        policy_versions=numbers,
    )


def _planned(
    batches: Sequence[MicroBatch], at_least: int = 1, max_tokens: int | None = None
) -> list[list[MicroBatch]]:
    plans = plan_passes(batches, at_least, max_tokens)
    return [[part_of(batch, rows) for rows in plan] for batch, plan in zip(batches, plans, strict=True)]


def _predicting_tokens(inputs: TrainInputs, targets: TrainTargets) -> list[list[int]]:
    """For each sequence the tokens that its targets follow."""
    flat = inputs.input_ids.flatten()
    return [
        flat[s[m]].tolist() for s, m in zip(targets.source_ids, targets.loss_mask, strict=True)
    ]  # fmt: skip


def _rows_of(part: tuple[TrainInputs, TrainTargets]) -> list[int]:
    """Which rows of the batch a part has: their prompts are of 3, 4, 5 and 6 tokens."""
    return [int((segments == 0).sum()) - 3 for segments in part[0].segment_ids]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_passes_together_are_the_batch(n: int) -> None:
    inputs, targets = _batch()
    [parts] = _planned([(inputs, targets)], n)
    assert len(parts) == n
    assert sorted(row for part in parts for row in _rows_of(part)) == [0, 1, 2, 3]
    for part in parts:
        chosen = [targets.episode_ids.index(name) for name in part[1].episode_ids]
        assert chosen == [i for i, row in enumerate(ROW_OF) if row in _rows_of(part)]
        assert _predicting_tokens(*part) == [_predicting_tokens(inputs, targets)[i] for i in chosen]
        assert part[1].policy_versions == chosen
        names = {f.name for f in dataclasses.fields(targets) if f.type in (torch.Tensor, torch.Tensor | None)}
        assert len(names) == 7
        for field in names - {"source_ids"}:
            assert torch.equal(getattr(part[1], field), getattr(targets, field)[chosen]), field


def test_a_pass_loses_the_padding_that_other_rows_needed() -> None:
    [parts] = _planned([_batch()], 4)
    assert [i.input_ids.shape[1] for i, _ in parts] == [13, 9, 8, 8]  # longest first
    assert all(int((i.segment_ids >= 0).sum()) == i.input_ids.numel() for i, _ in parts)


def test_a_rank_with_fewer_rows_gets_empty_passes() -> None:
    [short] = _planned([_batch()], 4)
    plans = _planned([_batch(), short[0]], at_least=3)
    assert [len(plan) for plan in plans] == [3, 3]
    assert [len(inputs.input_ids) for inputs, _ in plans[1]] == [1, 0, 0]
    inputs, targets = plans[1][2]
    stream = stream_of(inputs)
    assert stream.row_ids.tolist() == [-1] and stream.tokens.tolist() == [0]
    assert targets.target_ids.shape == (0, 5) and count(targets, "sequences") == 0


def test_plans_keep_to_the_budget_with_as_few_passes_as_may_be() -> None:
    rng = random.Random(0)
    for _ in range(60):
        ranks = [[rng.randint(1, 40) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 3))]
        budget, at_least = rng.choice([5, 30, 60, None]), rng.randint(1, 4)
        plans = _planned([from_text(_text(rows)) for rows in ranks], at_least, budget)
        [n] = {len(plan) for plan in plans}
        assert n >= min(at_least, max(map(len, ranks)))
        for rows, plan in zip(ranks, plans, strict=True):
            sizes = [(inputs.segment_ids >= 0).sum(1).tolist() for inputs, _ in plan]
            assert sorted(size for part in sizes for size in part) == sorted(rows)
            assert budget is None or all(len(part) <= 1 or sum(part) <= budget for part in sizes)
            assert sum(len(targets.target_ids) for _, targets in plan) == len(rows)
        if budget is not None and n > max(at_least, *(-(-sum(rows) // budget) for rows in ranks)):
            bins = [[sum(rows[i] for i in b) for b in fill_evenly(rows, n - 1)] for rows in ranks]
            assert max(map(max, bins)) > budget  # one pass less would not do


def test_rows_longer_than_the_budget_make_no_empty_passes() -> None:
    [plan] = _planned([from_text(_text([2000, 2000]))], max_tokens=400)
    assert [len(inputs.input_ids) for inputs, _ in plan] == [1, 1]


@pytest.mark.parametrize("loss", [GRPOLoss(beta=0.1), SFTLoss()], ids=["fixed horizon", "by tokens"])
@pytest.mark.parametrize("at_least", [1, 2])
def test_neither_ranks_nor_passes_change_the_loss_or_its_metrics(
    loss: GRPOLoss | SFTLoss, at_least: int
) -> None:
    shared = [_batch([0, 2]), _batch([1, 3])]
    assert shared[0][1].loss_mask.shape != shared[1][1].loss_mask.shape

    def computed(batches: list[MicroBatch]) -> tuple[float, dict[str, float]]:
        shares = Shares.of([targets for _, targets in batches], normalizer_of(loss))
        tally = Tally(token_means_of(loss))
        for passes in _planned(with_equal_lengths(batches), at_least):
            for _, t in passes:
                logprobs = -t.target_ids / 50.0  # of the policy, so to speak
                value, metrics = loss.from_logprobs(
                    logprobs, -logprobs, t.advantages, t.generator_logprobs, t.loss_mask, t.ref_logprobs
                )
                tally.add(float(value), as_floats(metrics), shares.weight(t), shares.token_weight(t))
        return sum(tally.losses), tally.metrics

    (one, metrics), (two, same) = computed([_batch()]), computed(shared)
    assert two == pytest.approx(one, rel=1e-5)
    assert same == pytest.approx(metrics, rel=1e-5)


def _text(lengths: list[int]) -> TextTrainBatch:
    columns = torch.arange(max(lengths)).expand(len(lengths), -1)
    mask = columns < torch.tensor(lengths)[:, None]
    return TextTrainBatch(columns, columns, mask, mask.float())


def test_sequences_without_targets_do_not_count() -> None:
    _, targets = _batch()
    mask = targets.loss_mask.clone()
    mask[0] = False
    targets = dataclasses.replace(targets, loss_mask=mask)
    assert count(targets, "sequences") == 6
    assert count(targets, "tokens") == 20 - 2


def test_text_becomes_rows_of_one_segment_up_to_the_last_target() -> None:
    batch = TextTrainBatch(
        input_ids=torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]]),
        target_ids=torch.tensor([[6, 7, 2, 0], [9, 2, 0, 0]]),
        target_mask=torch.tensor([[False, True, True, False], [True, False, False, False]]),
        target_weights=torch.tensor([[0.0, 1.0, 0.5, 0.0], [2.0, 0.0, 0.0, 0.0]]),
    )
    inputs, targets = from_text(batch)
    assert inputs.segment_ids.tolist() == [[0, 0, 0, -1], [0, -1, -1, -1]]
    assert inputs.positions.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0]]
    assert _predicting_tokens(inputs, targets) == [[6, 7], [8]]
    assert torch.equal(targets.advantages, batch.target_weights)


def test_the_episode_whose_numbers_are_not_finite_is_named_first() -> None:
    _, targets = _batch()
    advantages = targets.advantages.clone()
    advantages[3] = torch.nan
    assert name_episodes([dataclasses.replace(targets, advantages=advantages)]) == "of episode e3"


def test_a_masked_infinity_accuses_nobody() -> None:
    _, targets = _batch()
    logprobs = targets.generator_logprobs.clone()
    logprobs[0, 4] = -torch.inf
    names = name_episodes([dataclasses.replace(targets, generator_logprobs=logprobs)], limit=2)
    assert names == "of episodes e0, e1 and 5 more"
