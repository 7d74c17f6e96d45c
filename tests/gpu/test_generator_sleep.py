"""A generator that gives its GPU's memory to others while it sleeps, and batch-invariant kernels."""

import asyncio
from pathlib import Path

import pytest
import torch

from forge.actors.generator import Generator, call_seed
from forge.controller import Runtime
from forge.weights import close_store
from tests.integration.generators import PROMPT, Model, engine_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SAMPLING = {"n": 2, "max_tokens": 512, "temperature": 1.0, "ignore_eos": True}


def free_nbytes() -> int:
    return torch.cuda.mem_get_info()[0]


def test_asleep_its_memory_is_free_and_awake_it_has_the_weights_that_came_meanwhile(tiny_llama: Path) -> None:
    async def main() -> None:
        async with Runtime() as runtime:
            runtime.on_close(close_store)
            before = free_nbytes()
            config = {
                **engine_config(tiny_llama),
                "dtype": "bfloat16",
                "enforce_eager": False,
                "enable_sleep_mode": True,
                "gpu_memory_utilization": 0.4,
            }
            generator = await Generator.options(with_gpus=True).as_actor(config, SAMPLING)
            model = Model(generator, tiny_llama)
            awake, changed = free_nbytes(), model.changed(1)
            running = asyncio.create_task(generator.generate.call_one(PROMPT))
            await asyncio.sleep(0.2)
            await generator.sleep.call_one()
            await generator.sleep.call_one()
            assert free_nbytes() - awake > 0.8 * (before - awake)
            version = await model.update(changed)
            assert free_nbytes() - awake > 0.8 * (before - awake), "the update gives it back again"
            late = asyncio.create_task(generator.generate.call_one(PROMPT))
            await asyncio.sleep(0.2)
            assert not late.done()
            await generator.wake.call_one()
            assert len((await running)[0].token_ids) == 512
            for completion in await late:
                assert completion.generator_version == version
                gap, to_old = (
                    float((completion.logprobs - model.logprobs(completion, weights)).abs().mean())
                    for weights in (changed, model.original)
                )
                assert gap < 0.1 * to_old

    asyncio.run(main())


def test_a_call_is_answered_alike_alone_and_among_others(tiny_llama: Path) -> None:
    async def main() -> None:
        async with Runtime():
            config = {**engine_config(tiny_llama), "dtype": "bfloat16"}
            generator = await Generator.options(with_gpus=True).as_actor(config, SAMPLING, deterministic=True)
            generate = generator.generate.call_one
            alone = await generate(PROMPT, seed=call_seed(0, 1))
            among, *_ = await asyncio.gather(
                generate(PROMPT, seed=call_seed(0, 1)), *(generate(PROMPT * i, seed=i) for i in range(2, 9))
            )
            for completion, other in zip(among, alone, strict=True):
                assert torch.equal(completion.token_ids, other.token_ids)
                assert torch.equal(completion.logprobs, other.logprobs)

    asyncio.run(main())
