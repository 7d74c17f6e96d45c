"""A generator that comes late catches up with the store, and one whose caller has gone stops sampling."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.actors.generator import Generator
from forge.controller import Runtime, endpoint
from forge.data_models import Completion
from forge.weights import close_store
from tests.integration.generators import (
    PROMPT,
    Model,
    check_it_began_with_the_newest,
    engine_config,
    publish_some,
)

SAMPLING = {"n": 2, "max_tokens": 16}
LIMIT_S = 120


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


def test_it_starts_with_the_newest_complete_weights_and_a_cancelled_call_leaves_it_and_the_others_go_on(
    tiny_qwen3: Path,
) -> None:
    async def scenario() -> None:
        published = await publish_some(tiny_qwen3)
        options = Watched.options(env={"OMP_NUM_THREADS": "1"})
        actor = await options.as_actor(engine_config(tiny_qwen3), SAMPLING, in_flight="finish")
        model = Model(actor, tiny_qwen3)
        await check_it_began_with_the_newest(model, published)
        await model.update(model.original)

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

    async def main() -> None:
        async with Runtime() as runtime:
            runtime.on_close(close_store)
            await asyncio.wait_for(scenario(), LIMIT_S)

    asyncio.run(main())
