"""Cutting a batch, counting it, and turning text into rows."""

import dataclasses

import pytest
import torch

from forge.actors.trainer.micro_batch import count, from_text, name_episodes, split_micro_batches
from forge.data_models import Completion, TextTrainBatch, TrainInputs, TrainTargets
from forge.errors import ForgeError
from forge.rl.collate import pack_completions

LENGTHS = [[2, 3], [4], [1, 2, 5], [3]]  # of each row's completions


def _batch() -> tuple[TrainInputs, TrainTargets]:
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> torch.Tensor:
        return torch.randint(1, 100, (n,), generator=generator)

    groups = []
    for row, lengths in enumerate(LENGTHS):
        prompt = tokens(3 + row)
        groups.append([Completion("", tokens(n), -torch.ones(n), prompt_ids=prompt) for n in lengths])
    inputs, targets = pack_completions(groups)
    n = len(targets.target_ids)
    return inputs, dataclasses.replace(
        targets,
        advantages=torch.arange(n).float(),
        ref_logprobs=targets.generator_logprobs - 1,
        episode_ids=[f"e{i}" for i in range(n)],
    )


def _predicting_tokens(inputs: TrainInputs, targets: TrainTargets) -> list[list[int]]:
    """For each sequence the tokens that its targets follow."""
    flat = inputs.input_ids.flatten()
    return [
        flat[s[m]].tolist() for s, m in zip(targets.source_ids, targets.loss_mask, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_parts_together_are_the_batch(n: int) -> None:
    inputs, targets = _batch()
    parts = split_micro_batches(inputs, targets, n)
    assert len(parts) == n
    assert [name for _, t in parts for name in t.episode_ids] == targets.episode_ids
    assert [row for part in parts for row in _predicting_tokens(*part)] == _predicting_tokens(inputs, targets)
    for field in ("target_ids", "loss_mask", "advantages", "generator_logprobs", "ref_logprobs"):
        joined = torch.cat([getattr(t, field) for _, t in parts])
        assert torch.equal(joined, getattr(targets, field)), field


def test_a_part_loses_the_padding_that_other_rows_needed() -> None:
    parts = split_micro_batches(*_batch(), 4)
    assert [i.input_ids.shape[1] for i, _ in parts] == [8, 8, 13, 9]
    assert all(int((i.segment_ids >= 0).sum()) == i.input_ids.numel() for i, _ in parts)


def test_the_width_of_the_targets_stays() -> None:
    inputs, targets = _batch()
    assert {t.target_ids.shape[1] for _, t in split_micro_batches(inputs, targets, 2)} == {5}


def test_more_parts_than_rows_is_an_error() -> None:
    with pytest.raises(ForgeError, match="4 rows can't be cut into 5"):
        split_micro_batches(*_batch(), 5)


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
    assert inputs.positions[1].tolist() == [0, 1, 2, 3]
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
