"""New weights in an engine on a GPU, where they are loaded in place under captured graphs."""

import asyncio
from pathlib import Path

import pytest
import torch

from forge.actors.generator import Generator
from forge.controller import Runtime
from forge.weights import close_store
from tests.integration.generators import PROMPT, Model, Weights, engine_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


async def check(model: Model, weights: Weights, others: Weights) -> None:
    """Both what is sampled and what is scored is of these weights: far nearer to them than to the others."""
    [completion] = await model.generator.generate.route(PROMPT * 8)
    assert completion.prompt_ids is not None
    scores = await model.generator.score.route(
        [*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]
    )
    for logprobs in (completion.logprobs, scores[-len(completion.token_ids) :]):
        gap, to_others = (
            float((logprobs - model.logprobs(completion, w)).abs().mean()) for w in (weights, others)
        )
        assert gap < 0.1 * to_others


def test_updates_change_what_captured_graphs_compute(tiny_llama: Path) -> None:
    async def main() -> None:
        async with Runtime() as runtime:
            runtime.on_close(close_store)
            config = {**engine_config(tiny_llama), "dtype": "bfloat16", "enforce_eager": False}
            sampling = {"n": 1, "max_tokens": 64, "temperature": 1.0, "ignore_eos": True}
            generator = await Generator.options(with_gpus=True).as_actor(config, sampling)
            model = Model(generator, tiny_llama)
            first, second = model.changed(1), model.changed(2)
            await check(model, model.original, first)
            await model.update(first)
            await check(model, first, model.original)
            await model.update(second)
            await check(model, second, first)

    asyncio.run(main())
