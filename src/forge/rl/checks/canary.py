"""Canary: a few texts that trainer and generators must find equally probable after each update."""

import asyncio
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from forge.controller import ActorHandle, Service
from forge.data_models import TrainInputs
from forge.observability import record

CANARY_TOKENS = 192
"""Enough to make the mean steady in bfloat16, where single tokens differ by far more than it."""


async def logprobs_of(actor: ActorHandle | Service, texts: Sequence[list[int]]) -> Tensor:
    """Log-probabilities of these texts' tokens but the first of each, one text behind the other: float32."""
    return torch.cat(await asyncio.gather(*(actor.score.route(text) for text in texts)))


async def check_weights_arrived(
    policy: ActorHandle | Service, texts: Sequence[list[int]], trained: Tensor
) -> float:
    """Mean |log p_trainer - log p_generator| over the tokens of the texts and the replicas, in nats. Records
    it as logprob_gap/mean.

    trained: the trainer's log-probabilities (`logprobs_of`) under the version that the generators hold. The
    gap is rounding alone (1e-5 in float32, 0.045 to 0.062 for SmolLM2-135M in bfloat16) unless the weights
    did not arrive.
    """
    answers = await asyncio.gather(*(policy.score.fanout(text) for text in texts))
    expected = trained.split([len(text) - 1 for text in texts])
    gaps = [
        (own - logprobs).abs()
        for own, replicas in zip(expected, answers, strict=True)
        for logprobs in replicas
    ]
    gap = float(torch.cat(gaps).mean())
    record("logprob_gap", mean=gap)
    return gap


def canary_texts(batch: Sequence[TrainInputs], num_tokens: int = CANARY_TOKENS) -> list[list[int]]:
    """Prompts with their first completions: `num_tokens` tokens together, the last text cut, or all.

    Each is without its last token, so that an engine that takes no more has room for one.
    """
    texts: list[list[int]] = []
    left = num_tokens
    for text in _first_texts(batch):
        if left < 2:  # no token whose log-probability could be compared
            break
        texts.append(text[:left])
        left -= len(texts[-1])
    return texts


def _first_texts(batch: Sequence[TrainInputs]) -> Iterator[list[int]]:
    for inputs in batch:
        for ids, segments in zip(inputs.input_ids, inputs.segment_ids, strict=True):
            yield ids[(segments == 0) | (segments == 1)][:-1].tolist()
