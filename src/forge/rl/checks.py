"""Checks that a run is what it claims to be."""

import asyncio

from forge.controller import ActorHandle, Service
from forge.data_models import TrainInputs
from forge.observability import record


async def check_weights_arrived(
    trainer: ActorHandle, policy: ActorHandle | Service, text: list[int]
) -> float:
    """Mean |log p_trainer - log p_generator| over the tokens of a text, in nats; to be called while both hold
    the same version. Records it as logprob_gap/mean.

    It is rounding alone (1e-5 in float32, some 0.03 in bfloat16) unless the weights did not arrive.
    """
    trained, generating = await asyncio.gather(trainer.score.route(text), policy.score.route(text))
    gap = float((trained - generating).abs().mean())
    record("logprob_gap", mean=gap)
    return gap


def first_text(inputs: TrainInputs) -> list[int]:
    """The first row's prompt with its first completion but for its last token, so that an engine that takes
    no more has room for one."""
    segments = inputs.segment_ids[0]
    return inputs.input_ids[0][(segments == 0) | (segments == 1)][:-1].tolist()
