"""A generator over two processes: tensor and pipeline parallel, on CPU with gloo."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from forge.actors.generator import Generator
from forge.controller import ActorHandle, Runtime
from forge.controller.provisioner import is_running
from forge.errors import ActorFailure, ForgeError
from forge.weights import close_store
from tests.integration.generators import (
    PROMPT,
    Model,
    check_it_began_with_the_newest,
    engine_config,
    publish_some,
)

LIMIT_S = 30


Scenario = Callable[[Model], Coroutine[Any, Any, None]]


def with_generator(
    folder: Path, degree: str, *scenarios: Scenario, comes_late: bool = False, in_flight: str = "recompute"
) -> None:
    """Runs these one after the other. comes_late: the store has versions before it starts."""

    async def main() -> None:
        async with Runtime() as runtime:
            runtime.on_close(close_store)
            published = await publish_some(folder) if comes_late else {}
            actor = await Generator.options(procs=2, env={"OMP_NUM_THREADS": "1"}).as_actor(
                {**engine_config(folder), degree: 2}, {"n": 2, "max_tokens": 16}, in_flight=in_flight
            )
            model = Model(actor, folder)
            if published:
                await check_it_began_with_the_newest(model, published)
                await model.update(model.original)
            for scenario in scenarios:
                await scenario(model)

    before = segments()
    asyncio.run(main())
    deadline = time.monotonic() + 60  # what other tests have at the same time goes too
    while left := segments() - before:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.5)


def segments() -> set[str]:
    """Shared memory as vLLM and Python's multiprocessing name it."""
    return {path.name for path in Path("/dev/shm").iterdir() if "cpushm" in path.name or "psm_" in path.name}


async def check_weights_and_swap(model: Model) -> None:
    for temperature in (1.0, 0.7):
        completions = await model.generator.generate.route(PROMPT, temperature=temperature)
        assert model.gap(completions, model.original) < 1e-4
    await model.update(model.original)  # the first takes longer: it finds the store
    weights = model.changed(1)
    call = asyncio.create_task(model.generator.generate.route(PROMPT * 5, max_tokens=300, ignore_eos=True))
    await asyncio.sleep(0.5)
    version = await model.update(weights)
    assert not call.done()
    for completion in await call:
        assert completion.token_versions is not None
        new = completion.token_versions == version
        assert 0 < int(new.sum()) < 300
        for weights_then, tokens in ((model.original, ~new), (weights, new)):
            gap = (completion.logprobs - model.logprobs(completion, weights_then)).abs()
            assert float(gap[tokens].max()) < 2e-4
    assert isinstance(model.generator, ActorHandle)
    with pytest.raises(ForgeError, match="rank 1 of a generator has no engine: use .generate.route"):
        await model.generator.generate.call(PROMPT)


async def check_versions_of_tokens(model: Model) -> None:
    """Of a call that keeps its KV cache, which is of both weights then."""
    assert model.gap(await model.generator.generate.route(PROMPT), model.original) < 1e-4
    await model.update(model.original)
    call = asyncio.create_task(model.generator.generate.route(PROMPT * 5, max_tokens=300, ignore_eos=True))
    await asyncio.sleep(0.5)
    weights = model.changed(1)
    version = await model.update(weights)
    assert not call.done()
    for completion in await call:
        assert completion.token_versions is not None
        num_old = int((completion.token_versions < version).sum())
        assert 0 < num_old < 300
        gap = (completion.logprobs - model.logprobs(completion, model.original)).abs()
        assert float(gap[:num_old].max()) < 2e-4
        assert float(gap[num_old]) > 1e-2, "sampled from the old weights, said to be of the new"
    assert model.gap(await model.generator.generate.route(PROMPT), weights) < 1e-4


async def lose_rank_1(model: Model) -> None:
    assert isinstance(model.generator, ActorHandle)
    calls = [
        asyncio.create_task(model.generator.generate.route(PROMPT, max_tokens=900, ignore_eos=True))
        for _ in range(3)
    ]
    await asyncio.sleep(0.5)
    [replica] = await model.generator.replicas()
    victim = replica.pids[1]
    os.kill(victim, signal.SIGKILL)
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), LIMIT_S)
    assert all(isinstance(outcome, ActorFailure) for outcome in outcomes), outcomes
    with pytest.raises(ActorFailure):
        await asyncio.wait_for(model.generator.generate.route(PROMPT), LIMIT_S)
    assert not is_running(victim)


def test_tensor_parallel_ranks_share_the_model_and_a_lost_one_fails_the_calls_instead_of_hanging(
    tiny_llama: Path,
) -> None:
    with_generator(tiny_llama, "tensor_parallel_size", check_weights_and_swap, lose_rank_1)


def test_tensor_parallel_ranks_of_an_untied_model_start_with_the_newest_weights(tiny_qwen3: Path) -> None:
    with_generator(tiny_qwen3, "tensor_parallel_size", check_weights_and_swap, comes_late=True)


def test_pipeline_stages_each_hold_the_tied_embedding_and_name_the_weights_of_each_token(
    tiny_llama: Path,
) -> None:
    with_generator(tiny_llama, "pipeline_parallel_size", check_versions_of_tokens, in_flight="keep")
