"""Packing against a brute-force reading of every packed token."""

from dataclasses import replace

import pytest
import torch

from forge.data_models import Completion, Episode
from forge.errors import ForgeError
from forge.rl.collate import collate, pack_completions, pack_episodes


def completion(prompt: list[int], answer: list[int], temperature: float = 1.0) -> Completion:
    return Completion(
        text="",
        token_ids=torch.tensor(answer),
        logprobs=-torch.arange(1.0, len(answer) + 1),
        prompt_ids=torch.tensor(prompt),
        temperature=temperature,
    )


def random_groups(seed: int) -> list[list[Completion]]:
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        size = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(0, 50, (size,), generator=generator).tolist()

    return [[completion(prompt, ids(1, 9)) for _ in range(3)] for prompt in (ids(1, 12) for _ in range(4))]


@pytest.mark.parametrize("max_row_tokens", [15, 1000])
def test_every_target_sees_exactly_its_prompt_and_its_own_earlier_tokens(max_row_tokens: int) -> None:
    for seed in range(5):
        groups = random_groups(seed)
        inputs, targets = pack_completions(groups, max_row_tokens)
        length = inputs.input_ids.shape[1]
        for n, c in enumerate([c for group in groups for c in group]):
            assert c.prompt_ids is not None
            text = c.prompt_ids.tolist() + c.token_ids.tolist()
            assert targets.loss_mask[n].tolist() == [
                t < len(c.token_ids) for t in range(targets.loss_mask.shape[1])
            ]
            for t in range(len(c.token_ids)):
                row, column = divmod(int(targets.source_ids[n, t]), length)
                segment = int(inputs.segment_ids[row, column])
                seen = [
                    j
                    for j in range(column + 1)
                    if inputs.segment_ids[row, j] == 0 or (inputs.segment_ids[row, j] == segment)
                ]
                assert inputs.input_ids[row, seen].tolist() == text[: len(c.prompt_ids) + t]
                assert inputs.positions[row, seen].tolist() == list(range(len(c.prompt_ids) + t))
                assert targets.target_ids[n, t] == c.token_ids[t]
                assert targets.generator_logprobs[n, t] == c.logprobs[t]


def test_a_long_group_is_laid_over_rows_within_the_limit() -> None:
    group = [completion([1] * 4, [2] * 5) for _ in range(4)]
    inputs, _ = pack_completions([group], max_row_tokens=14)
    assert inputs.input_ids.shape == (2, 14)


def test_a_shared_prompt_stands_once() -> None:
    group = [completion([1] * 40, [2] * 10) for _ in range(8)]
    inputs, _ = pack_completions([group])
    assert inputs.input_ids.shape == (1, 40 + 8 * 10)


def episode(group: str, answer: list[int], ref: bool = True) -> Episode:
    c = completion([1, 2], answer)
    return Episode(f"{group}/{answer}", group, c, "", 1.0, 0.5, -torch.ones(len(answer)) if ref else None)


def test_episodes_keep_their_order_rank_by_rank() -> None:
    a, b, c = episode("a", [1]), episode("a", [2, 3]), episode("b", [4])
    inputs, targets = collate([[a, b], [c]])
    assert [t.episode_ids for t in targets] == [["a/[1]", "a/[2, 3]"], ["b/[4]"]]
    assert [i.input_ids.shape[0] for i in inputs] == [1, 1]
    assert targets[0].advantages.tolist() == [0.5, 0.5]
    assert targets[0].ref_logprobs is not None and targets[0].ref_logprobs.tolist() == [[-1, 0], [-1, -1]]


def test_advantages_per_token_stand_where_their_tokens_do_and_a_number_stands_for_all() -> None:
    by_token = replace(episode("a", [1, 2, 3]), advantage=torch.tensor([0.1, -0.2, 0.3]))
    _, targets = pack_episodes([episode("a", [4, 5]), by_token])
    assert torch.equal(targets.advantages, torch.tensor([[0.5, 0.5, 0], [0.1, -0.2, 0.3]]))
    assert targets.advantages.dtype == torch.float32
    with pytest.raises(ForgeError, match=r"a/\[1, 2, 3\] has 3 tokens but advantages of shape \[2\]"):
        pack_episodes([replace(by_token, advantage=torch.zeros(2))])


def test_batches_that_can_not_be_trained_on_are_refused_by_name() -> None:
    with pytest.raises(ForgeError, match="with and without ref_logprobs"):
        pack_episodes([episode("a", [1]), episode("a", [2], ref=False)])
    with pytest.raises(ForgeError, match="with and without ref_logprobs .*, got 1 with and 1 without"):
        collate([[episode("a", [1])], [episode("a", [2], ref=False)]])
    with pytest.raises(ForgeError, match="share one prompt"):
        pack_completions([[completion([1], [2]), completion([3], [2])]])
    with pytest.raises(ForgeError, match="has no tokens"):
        pack_completions([[completion([1], [])]])
    with pytest.raises(ForgeError, match=r"one temperature, got \[0.5, 1.0\]"):
        pack_completions([[completion([1], [2]), completion([1], [2], temperature=0.5)]])
    short = Completion("", torch.tensor([1, 2]), torch.tensor([0.0]), prompt_ids=torch.tensor([1]))
    with pytest.raises(ForgeError, match="2 tokens but 1 log-prob"):
        pack_completions([[short]])
