"""check_weights_arrived with actors that answer from a table."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from forge.data_models import TrainInputs
from forge.observability.metrics import drain
from forge.rl.checks import check_weights_arrived, first_text


def scorer(*logprobs: float) -> Any:
    """Something with the route verb of an actor or a service."""

    async def route(text: list[int]) -> torch.Tensor:
        assert text == [5, 6, 7, 8]
        return torch.tensor(logprobs)

    return SimpleNamespace(score=SimpleNamespace(route=route))


def test_the_gap_is_the_mean_absolute_difference() -> None:
    drain()
    trainer, policy = scorer(-1.0, -2.0, -3.0), scorer(-1.5, -2.0, -2.0)
    gap = asyncio.run(check_weights_arrived(cast(Any, trainer), cast(Any, policy), [5, 6, 7, 8]))
    assert gap == pytest.approx(0.5)
    assert drain()["logprob_gap/mean"].total == pytest.approx(0.5)


def test_the_text_is_the_prompt_with_its_first_completion_but_for_the_last_token() -> None:
    ids = torch.tensor([[1, 2, 3, 10, 11, 12, 20, 21, 0]])
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, -1]])
    assert first_text(TrainInputs(ids, torch.zeros_like(ids), segments)) == [1, 2, 3, 10, 11]
