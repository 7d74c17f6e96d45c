"""WeightSync with the real replay buffer; trainer and generators take as long as chance wants."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from forge.actors.replay_buffer import BufferInfo, ReplayBuffer
from forge.data_models import TrainInputs
from forge.errors import FanoutError, WeightsMismatch, WeightsMissing
from forge.rl.loops import async_rl_loop
from forge.rl.weight_sync import WeightSync
from tests.unit.actors.test_replay_buffer_kill import episode, ids

PARTS = ("train", "push", "store", "score", "update", "rollout")
GROUP, GROUPS = 2, 2  # episodes of a rollout, rollouts of a step
IDS = torch.tensor([[1, 2, 3, 4]])
BATCH = [TrainInputs(IDS, IDS, torch.tensor([[0, 0, 1, 1]]))]


def handle(**endpoints: Callable[..., Awaitable[Any]]) -> Any:
    """Something with the verbs of an actor or a service, of one process."""

    def verbs(endpoint: Callable[..., Awaitable[Any]]) -> Any:
        async def fanout(*args: Any, **kwargs: Any) -> list[Any]:
            return [await endpoint(*args, **kwargs)]

        return SimpleNamespace(route=endpoint, call=endpoint, call_one=endpoint, fanout=fanout)

    return cast(Any, SimpleNamespace(**{name: verbs(endpoint) for name, endpoint in endpoints.items()}))


@dataclass
class World:
    """A trainer and a generator that know their version only; `pace` gives the turns that something takes."""

    pace: Callable[[str], int] = lambda what: 0
    trained: int = 0  # steps
    generating: int = 0
    events: list[str] = field(default_factory=list)
    error: Exception | None = None  # of the next update

    async def take(self, what: str) -> None:
        for _ in range(self.pace(what)):
            await asyncio.sleep(0)

    async def train(self) -> None:
        await self.take("train")
        self.trained += 1
        self.events.append(f"trained {self.trained}")

    async def push(self, version: int) -> None:
        assert version == self.trained, "pushed weights of another step"
        await self.take("push")
        self.events.append(f"pushed {version}")

    async def finish_push(self) -> None:
        await self.take("store")

    async def update(self, version: int) -> int:
        await self.take("update")
        if self.error is not None:
            raise self.error
        self.generating = version
        self.events.append(f"generating {version}")
        return version

    async def trainer_scores(self, text: list[int]) -> torch.Tensor:
        await self.take("score")
        self.events.append(f"trainer scores {self.trained}")
        return torch.zeros(len(text) - 1)

    async def generator_scores(self, text: list[int]) -> torch.Tensor:
        self.events.append(f"generator scores {self.generating}")
        return torch.ones(len(text) - 1)

    def sync(self, buffer: Any, **options: Any) -> WeightSync:
        trainer = handle(push_weights=self.push, finish_push=self.finish_push, score=self.trainer_scores)
        return WeightSync(
            trainer, handle(update_weights=self.update, score=self.generator_scores), buffer, **options
        )


async def simulate(seed: int, max_age: int, interval: int, steps: int = 10) -> BufferInfo:
    """A run in which everything takes as long as chance wants; each batch must be young enough."""
    chance = random.Random(seed)
    longest = {what: chance.choice([0, 1, 4, 12, 40]) for what in PARTS}
    world = World(pace=lambda what: chance.randint(0, longest[what]))
    buffer = ReplayBuffer(GROUP * GROUPS, max_age, sync_interval=interval)
    policy_version: dict[str, int] = {}

    async def rollout() -> None:
        group = str(await buffer.admit(GROUP))
        policy_version[group] = world.generating
        await world.take("rollout")
        await buffer.add(
            *(replace(episode(f"{group}/{i}", policy_version[group]), group_id=group) for i in range(GROUP))
        )

    async def learn(step: int) -> None:
        batch = await buffer.sample(step - 1, wait=True)
        assert all(step - 1 - policy_version[name.split("/")[0]] <= max_age for name in ids(batch))
        await world.train()
        await sync.push(step, BATCH, must=step % 5 == 0, wait=step == steps)

    async with world.sync(handle(generating=buffer.generating), interval=interval) as sync:
        await async_rl_loop(rollout, learn, steps=steps, rollout_threads=chance.choice([1, 2, 4, 16]))
    return await buffer.info()


@pytest.mark.parametrize(
    ("max_age", "interval"), [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)]
)
def test_no_episode_is_thrown_away_and_nothing_hangs_however_long_anything_takes(
    max_age: int, interval: int
) -> None:
    for seed in range(25):
        info = asyncio.run(asyncio.wait_for(simulate(seed, max_age, interval), 10))
        assert info.num_dropped == 0, f"seed {seed}"
        assert info.num_sampled == 10 * GROUP * GROUPS


def test_a_push_returns_before_the_generators_have_it_and_the_next_waits_for_them() -> None:
    """The trainer's side of the canary is scored before the next step, the generator's after its update."""

    async def main() -> list[str]:
        world = World(pace=lambda what: 100 if what == "update" else 0)
        buffer = ReplayBuffer(GROUP * GROUPS, 1)
        async with world.sync(handle(generating=buffer.generating)) as sync:
            for step in (1, 2):
                await world.train()
                await sync.push(step, BATCH, wait=step == 2)
                world.events.append("goes on")
        return world.events

    assert asyncio.run(main()) == [
        *("trained 1", "pushed 1", "trainer scores 1", "goes on"),
        *("trained 2", "generating 1", "generator scores 1"),
        *("pushed 2", "trainer scores 2", "generating 2", "generator scores 2", "goes on"),
    ]


def test_only_every_so_many_versions_are_pushed_and_without_a_canary_nothing_is_scored() -> None:
    async def main() -> list[str]:
        world, buffer = World(), ReplayBuffer(GROUP * GROUPS, 1, sync_interval=2)
        async with world.sync(handle(generating=buffer.generating), interval=2, canary=False) as sync:
            for step in range(1, 6):
                await world.train()
                await sync.push(step, BATCH)
        return [event for event in world.events if not event.startswith("trained")]

    assert asyncio.run(main()) == ["pushed 2", "generating 2", "pushed 4", "generating 4"]


def test_a_version_that_is_to_be_asked_next_is_pushed_whatever_the_interval() -> None:
    async def main() -> list[int]:
        world, buffer = World(), ReplayBuffer(GROUP * GROUPS, 1, sync_interval=2)
        generating: list[int] = []
        async with world.sync(handle(generating=buffer.generating), interval=2, canary=False) as sync:
            for step in range(1, 6):
                await world.train()
                await sync.push(step, BATCH, must=step in (3, 5), wait=True)
                generating.append(world.generating)
        return generating

    assert asyncio.run(main()) == [0, 2, 3, 4, 5]


def test_an_update_that_fails_ends_the_run_at_once_with_its_error() -> None:
    async def main() -> None:
        world, buffer = World(error=WeightsMissing("rank 1 of the trainer is gone")), ReplayBuffer(1, 0)

        async def learn(step: int) -> None:
            await world.train()
            await sync.push(step, BATCH)
            await asyncio.sleep(100)  # a long step

        async with world.sync(handle(generating=buffer.generating)) as sync:
            await async_rl_loop(lambda: asyncio.sleep(100), learn, steps=2)

    with pytest.raises(WeightsMissing, match="rank 1"):
        asyncio.run(asyncio.wait_for(main(), 5))


def test_when_one_of_two_generators_can_not_prove_its_weights_the_run_ends_with_which_and_why() -> None:
    async def main() -> None:
        world, buffer = World(), ReplayBuffer(1, 0)

        async def fanout(version: int) -> list[int]:
            error = FanoutError("update_weights failed on replica 1 of policy")
            error.results = {0: await world.update(version)}
            raise error from WeightsMismatch("policy[1]: q_proj was not loaded as it arrived")

        sync = world.sync(handle(generating=buffer.generating))
        cast(Any, sync)._policy.update_weights.fanout = fanout
        async with sync:
            await world.train()
            await sync.push(1, BATCH, wait=True)

    with pytest.raises(FanoutError, match="replica 1 of policy") as raised:
        asyncio.run(main())
    assert raised.value.results == {0: 1} and isinstance(raised.value.__cause__, WeightsMismatch)
