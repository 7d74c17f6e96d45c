"""A generator that comes late catches up with the store, and one whose caller has gone stops sampling."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forge.actors.generator import Generator
from forge.controller import Runtime, endpoint
from forge.data_models import Completion
from forge.weights import close_store, open_store, publish, retire
from tests.integration.generators import PROMPT, Model, engine_config

SAMPLING = {"n": 2, "max_tokens": 16}
LIMIT_S = 60


@dataclass(frozen=True)
class EngineState:
    num_requests: int
    num_groups: int  # requests for several completions
    kv_cache_in_use: float


class Watched(Generator):
    """Tells what its engine is busy with."""

    @endpoint
    async def state(self) -> EngineState:
        engine: Any = self._engine._engine
        return EngineState(
            engine.output_processor.get_num_unfinished_requests(),
            len(engine.output_processor.parent_requests),
            engine.engine_core.engine_core.scheduler.kv_cache_manager.usage,
        )

    @endpoint
    async def num_held_back(self) -> int:
        return len(self._loop._held_back)


def with_store(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with Runtime() as runtime:
            await open_store()
            runtime.on_close(close_store)
            await asyncio.wait_for(scenario(), LIMIT_S)

    asyncio.run(main())


async def start(folder: Path, *, procs: int = 1, in_flight: str = "recompute") -> Model:
    config = {**engine_config(folder), "tensor_parallel_size": procs}
    options = Watched.options(procs=procs, env={"OMP_NUM_THREADS": "1"})
    return Model(await options.as_actor(config, SAMPLING, in_flight=in_flight), folder)


@pytest.mark.parametrize("procs", [1, 2])
def test_a_generator_starts_with_the_newest_complete_weights(tiny_qwen3: Path, procs: int) -> None:
    async def scenario() -> None:
        # Only its weights are wanted here: a Model without a generator.
        weights = {v: Model(None, tiny_qwen3).changed(v) for v in (901, 902, 903)}  # type: ignore[arg-type]
        await publish(901, weights[901], rank=0, world_size=1)
        await publish(902, weights[902], rank=0, world_size=1)
        await publish(903, weights[903], rank=0, world_size=2)  # rank 1 has not yet published
        model = await start(tiny_qwen3, procs=procs)
        assert await model.generator.version.route() == 902
        completions = await model.generator.generate.route(PROMPT)
        assert {c.generator_version for c in completions} == {902}
        assert model.gap(completions, weights[902]) < 1e-4
        assert await model.generator.update_weights.route(901) == 902, "it does not go back"
        assert await model.generator.update_weights.route(902) == 902
        await asyncio.gather(retire(901), retire(902), retire(903))
        assert await model.generator.update_weights.route(902) == 902, "what it holds it needs not fetch"
        assert model.gap(await model.generator.generate.route(PROMPT), weights[902]) < 1e-4

    with_store(scenario)


def test_a_cancelled_call_leaves_the_engine_and_the_others_go_on(tiny_llama: Path) -> None:
    async def scenario() -> None:
        model = await start(tiny_llama, in_flight="finish")
        await model.update(model.original)  # the first starts a volume: it must not outlast the calls below

        def call(n: int, max_tokens: int) -> asyncio.Task[list[Completion]]:
            sampling = {"n": n, "max_tokens": max_tokens, "ignore_eos": True}
            return asyncio.create_task(model.generator.generate.route(PROMPT * 3, **sampling))

        abandoned, survivor = [call(1, 900), call(4, 900)], call(2, 800)
        while (await model.generator.state.route()).num_requests < 7:
            await asyncio.sleep(0.05)
        for task in abandoned:
            task.cancel()
        completions = await survivor
        # Those that were cancelled would have a hundred tokens left.
        assert await model.generator.state.route() == EngineState(0, 0, 0.0)
        assert [len(c.token_ids) for c in completions] == [800, 800]
        assert model.gap(completions, model.original) < 2e-4
        weights = model.changed(1)
        old, endless = call(2, 300), call(4, 900)
        while (await model.generator.state.route()).num_requests < 6:
            await asyncio.sleep(0.05)
        update = asyncio.create_task(model.update(weights))
        while await model.generator.num_held_back.route() == 0:
            await asyncio.sleep(0.05)
        new = call(3, 16)
        completions = await old
        assert not update.done() and not new.done()
        endless.cancel()
        version = await update
        assert {c.generator_version for c in completions} == {version - 1}
        assert model.gap(completions, model.original) < 2e-4
        assert {c.generator_version for c in await new} == {version}
        assert model.gap(await new, weights) < 1e-4

    with_store(scenario)
