"""A deterministic generator answers a call bit for bit alike, whatever else it does and has done."""

import asyncio
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forge.actors.generator import Generator, call_seed
from forge.controller import ActorHandle, Runtime
from forge.data_models import Completion
from forge.errors import ConfigError
from tests.integration.generators import PROMPT, engine_config
from tests.tiny import make_tiny_model

SAMPLING = {"n": 4, "max_tokens": 40, "temperature": 1.0}
ASKED = PROMPT * 8  # several blocks of the KV cache
Answer = tuple[list[Completion], Tensor]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that vLLM's kernels for a CPU compute a row alone otherwise than one of many."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    return make_tiny_model(folder, hidden_size=576, intermediate_size=1536)


async def start(folder: Path, dtype: str) -> ActorHandle:
    config = {**engine_config(folder), "dtype": dtype, "max_num_seqs": 16}
    options = Generator.options(env={"OMP_NUM_THREADS": "1"})
    return await options.as_actor(config, SAMPLING, deterministic=True)


async def ask(generator: ActorHandle) -> Answer:
    """What the tests compare: a completion, a group, and what is thought of a text."""
    single, group = [await generator.generate.call_one(ASKED, seed=call_seed(3, n), n=n) for n in (1, 4)]
    assert len({tuple(c.token_ids.tolist()) for c in group}) == 4
    text = [*single[0].prompt_ids.tolist(), *single[0].token_ids.tolist()]
    return [*single, *group], await generator.score.call_one(text)


async def make_traffic(generator: ActorHandle) -> None:
    """Calls of other lengths and numbers, which begin as the prompt that is asked about; one is given up."""
    calls = [
        generator.generate.call_one(ASKED + PROMPT * i, seed=i, n=1 + i, max_tokens=20 + 9 * i)
        for i in range(7)
    ]
    first, *others = map(asyncio.ensure_future, calls)
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.gather(*others)


def assert_equal(found: Answer, expected: Answer) -> None:
    for completion, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(completion.token_ids, other.token_ids)
        assert torch.equal(completion.logprobs, other.logprobs)
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(("dtype", "num_engines"), [("float32", 2), ("bfloat16", 1)])
def test_a_call_is_answered_alike_alone_among_others_after_others_and_by_another_engine(
    wide: Path, dtype: str, num_engines: int
) -> None:
    async def main() -> None:
        async with Runtime():
            generator, *fresh = await asyncio.gather(*(start(wide, dtype) for _ in range(num_engines)))
            alone = await ask(generator)
            traffic = asyncio.create_task(make_traffic(generator))
            await asyncio.sleep(0.01)
            assert_equal(await ask(generator), alone)
            await traffic
            assert_equal(await ask(generator), alone)
            for other in fresh:
                assert_equal(await ask(other), alone)
            with pytest.raises(ConfigError, match="needs a seed for each call that samples"):
                await generator.generate.call_one(PROMPT)
            assert await generator.generate.call_one(PROMPT, temperature=0.0, n=1)

    asyncio.run(main())
