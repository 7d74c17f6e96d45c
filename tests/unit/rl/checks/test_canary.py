"""The canary with actors that answer from a table."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from forge.data_models import TrainInputs
from forge.observability.metrics import drain
from forge.rl.checks import canary_texts, check_weights_arrived, logprobs_of

TEXTS = [[5, 6, 7, 8], [9, 10]]


def scorer(*replicas: dict[int, list[float]]) -> Any:
    """Something with the verbs of a service; replicas: log-probabilities by the first token of a text."""

    async def fanout(text: list[int]) -> list[Tensor]:
        return [torch.tensor(replica[text[0]]) for replica in replicas]

    async def route(text: list[int]) -> Tensor:
        return (await fanout(text))[0]

    return cast(Any, SimpleNamespace(score=SimpleNamespace(route=route, fanout=fanout)))


def test_the_gap_is_the_mean_absolute_difference_over_all_tokens_and_replicas() -> None:
    drain()
    trainer = scorer({5: [-1.0, -2.0, -3.0], 9: [-4.0]})
    policy = scorer({5: [-1.5, -2.0, -2.0], 9: [-4.0]}, {5: [-1.0, -2.0, -3.0], 9: [-3.5]})

    async def check() -> float:
        return await check_weights_arrived(policy, TEXTS, await logprobs_of(trainer, TEXTS))

    assert asyncio.run(check()) == pytest.approx((0.5 + 1.0 + 0.5) / 8)
    assert drain()["logprob_gap/mean"].total == pytest.approx(0.25)


def test_texts_are_prompts_with_their_first_completion_but_for_the_last_token_and_no_longer() -> None:
    ids = torch.tensor([[1, 2, 3, 10, 11, 12, 20, 21, 0], [4, 13, 14, 22, 0, 0, 0, 0, 0]])
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, -1], [0, 1, 1, 2, -1, -1, -1, -1, -1]])
    inputs = TrainInputs(ids, torch.zeros_like(ids), segments)
    first, second = [1, 2, 3, 10, 11], [4, 13]
    assert canary_texts([inputs, inputs]) == [first, second, first, second]  # of both ranks
    assert canary_texts([inputs, inputs], num_tokens=8) == [first, second]
    assert canary_texts([inputs, inputs], num_tokens=6) == [first]
    assert canary_texts([inputs, inputs], num_tokens=4) == [first[:4]]
