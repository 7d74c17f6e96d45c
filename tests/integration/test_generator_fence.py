"""Replicas are killed around weight updates: no completion is sampled from weights that it does not name."""

import asyncio
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from forge.actors.generator import Generator
from forge.controller import Runtime, Service
from forge.data_models import Completion
from forge.weights import close_store, publish, retire
from tests.integration.generators import Model, Weights, engine_config

NUM_CALLERS = 3
HEAL_LIMIT_S = 90
PROMPT_TOKENS = 40  # more than one block of the KV cache, so that a stale prefix would show
Moment = Literal["before", "during", "after"]


@dataclass
class Traffic:
    """Calls one after the other, each with the version that every replica held when it was made."""

    policy: Service
    floor: int = 0
    pause_s: float = 0.0  # between two calls of one caller
    answers: list[tuple[int, Completion]] = field(default_factory=list)

    async def caller(self, seed: int) -> None:
        choice = random.Random(seed)
        prompts = [[choice.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(4)]
        while True:
            floor = self.floor
            [completion] = await self.policy.generate.route(
                choice.choice(prompts), max_tokens=8, temperature=1.0
            )
            self.answers.append((floor, completion))
            await asyncio.sleep(self.pause_s)

    async def more(self, num_answers: int) -> None:
        """Until that many more calls have been answered."""
        wanted = len(self.answers) + num_answers
        while len(self.answers) < wanted:
            await asyncio.sleep(0.05)


async def healed(policy: Service, killed: int) -> None:
    """Until every replica serves, none of them in the process that was killed."""
    async with asyncio.timeout(HEAL_LIMIT_S):
        while True:
            replicas = await policy.replicas()
            if all(r.state.value == "healthy" and killed not in r.pids for r in replicas):
                return
            await asyncio.sleep(0.1)


async def update_and_kill(traffic: Traffic, version: int, weights: Weights, moment: Moment) -> None:
    """A new version reaches all replicas, of which one is killed."""
    policy = traffic.policy
    replicas = await policy.replicas()
    [victim] = replicas[version % len(replicas)].pids
    await publish(version, weights, rank=0, world_size=1)
    if moment == "before":
        os.kill(victim, signal.SIGKILL)
    update = asyncio.create_task(policy.update_weights.fanout(version))
    if moment == "during":
        await asyncio.sleep(0.01)
        os.kill(victim, signal.SIGKILL)
    assert set(await update) == {version}
    traffic.floor = version
    if moment == "after":
        os.kill(victim, signal.SIGKILL)
    await traffic.more(40)
    traffic.pause_s = 0.5  # what starts needs the cores, too
    await healed(policy, victim)
    traffic.pause_s = 0.0
    await traffic.more(40)
    if version > 1:
        await retire(version - 1)


def check(model: Model, weights: dict[int, Weights], answers: list[tuple[int, Completion]]) -> None:
    """Each completion's versions are new enough, and its log-probabilities those of these versions."""
    for floor, completion in answers:
        assert completion.token_versions is not None
        oldest = int(completion.token_versions.min())
        assert completion.generator_version == oldest
        assert oldest >= floor, "sampled from weights that were already replaced everywhere"
    for version, weights_then in weights.items():
        named = [c for _, c in answers if c.token_versions is not None and version in c.token_versions]
        for completion, logprobs in zip(named, model.all_logprobs(named, weights_then), strict=True):
            gap = (completion.logprobs - logprobs).abs()[completion.token_versions == version]
            assert float(gap.max()) < 1e-3, f"not sampled from version {version}"


async def rounds(folder: Path) -> None:
    config = {**engine_config(folder), "max_model_len": 64}
    options = Generator.options(num_replicas=2, env={"OMP_NUM_THREADS": "1"})
    policy = await options.as_service(config, {"n": 1})
    model, traffic = Model(policy, folder), Traffic(policy)
    weights = {0: model.original}
    moments: list[Moment] = ["before", "during", "after"]
    async with asyncio.TaskGroup() as group:
        callers = [group.create_task(traffic.caller(seed)) for seed in range(NUM_CALLERS)]
        await traffic.more(50)
        for version, moment in enumerate(moments, 1):
            weights[version] = model.changed(version)
            await update_and_kill(traffic, version, weights[version], moment)
        for caller in callers:
            caller.cancel()
    assert await policy.version.fanout() == [len(moments)] * 2
    assert {c.generator_version for _, c in traffic.answers} == set(weights)
    check(model, weights, traffic.answers)


@pytest.mark.slow
def test_no_completion_hides_its_version_when_replicas_die_around_updates(tiny_llama: Path) -> None:
    async def main() -> None:
        async with Runtime() as runtime:
            runtime.on_close(close_store)
            await rounds(tiny_llama)

    asyncio.run(main())
