"""ReplayBuffer.restart: a rollout whose group teaches nothing asks another prompt, in its own place."""

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge.actors import replay_buffer
from forge.actors.replay_buffer import BufferInfo, ReplayBuffer
from forge.data_models import Episode
from forge.errors import ForgeError
from forge.observability.metrics import drain
from forge.rl.loops import async_rl_loop
from tests.unit.actors.test_replay_buffer_kill import call, episode, ids, started
from tests.unit.rl.test_weight_sync import BATCH, GROUP, GROUPS, World, handle

# Kind of prompt -> how many there are in 10, how often a group of it is mixed, turns that a mixed group takes
# and one of equal rewards.
PROMPTS = {"easy": (4, 0.1, 3, 1), "fair": (2, 0.8, 9, 2), "long": (2, 0.5, 45, 30), "hard": (2, 0.15, 60, 4)}


def group(name: int | str, version: int = 0) -> list[Episode]:
    return [replace(episode(f"{name}/{i}", version), group_id=str(name)) for i in range(GROUP)]


def groups_of(batch: Any) -> list[str]:
    """In order."""
    return [id.split("/")[0] for id in ids(batch)[::GROUP]]


def distance(counts: Counter[str]) -> float:
    """Chi-square between trained kinds and the kinds that a mixed group has, drawn one after the other."""
    share = {kind: number * mixed for kind, (number, mixed, *_) in PROMPTS.items()}
    expected = {kind: counts.total() * part / sum(share.values()) for kind, part in share.items()}
    return sum((counts[kind] - number) ** 2 / number for kind, number in expected.items())


async def simulate(
    seed: int, max_age: int, interval: int, steps: int, *, told: bool = True
) -> tuple[Counter[str], BufferInfo]:
    """A run that draws prompts until a group is mixed; told: the buffer lets it begin, and knows of each."""
    chance = random.Random(seed)
    longest = {"train": chance.choice([0, 10, 60]), "update": chance.choice([0, 5, 30])}
    world = World(pace=lambda what: chance.randint(0, longest.get(what, 0)))
    buffer = ReplayBuffer(GROUP * GROUPS, max_age, sync_interval=interval)
    untold = itertools.count()
    kinds: dict[str, str] = {}  # by the group
    begun: dict[str, int] = {}  # version that generated when a group was last begun
    trained: Counter[str] = Counter()

    async def rollout() -> None:
        number = await buffer.admit(GROUP) if told else next(untold)
        while True:
            [kind] = chance.choices(list(PROMPTS), weights=[number for number, *_ in PROMPTS.values()])
            _, share, *turns = PROMPTS[kind]
            is_mixed = chance.random() < share
            begin = world.generating
            for _ in range(turns[0 if is_mixed else 1]):
                await asyncio.sleep(0)
            if is_mixed:
                break
            if told:
                number = await buffer.restart(number)
        name = str(number)
        kinds[name], begun[name] = kind, begin
        await buffer.add(*group(name, begin))

    async def learn(step: int) -> None:
        batch = await buffer.sample(step - 1, wait=True)
        names = groups_of(batch)
        assert len(ids(batch)) == GROUP * GROUPS and len(set(names)) == GROUPS
        assert all(step - 1 - begun[name] <= max_age for name in names)
        trained.update(kinds[name] for name in names)
        await world.train()
        await sync.push(step, BATCH, wait=step == steps)

    async with world.sync(handle(generating=buffer.generating), interval=interval, canary=False) as sync:
        await async_rl_loop(rollout, learn, steps=steps, rollout_threads=chance.choice([4, 6, 16]))
    return trained, await buffer.info()


@pytest.mark.parametrize(("max_age", "interval"), [(0, 1), (1, 1), (3, 2)])
def test_trained_prompts_are_those_of_mixed_groups_however_long_each_outcome_takes(
    max_age: int, interval: int
) -> None:
    trained: Counter[str] = Counter()
    for seed in range(2):
        counts, info = asyncio.run(asyncio.wait_for(simulate(seed, max_age, interval, steps=120), 20))
        assert info.num_dropped == 0 and info.num_sampled == 120 * GROUP * GROUPS
        assert info.num_restarted > 120 * GROUPS  # most groups are not mixed
        trained += counts
    assert distance(trained) < 16.3  # once in a thousand, with three degrees of freedom


def test_rollouts_that_start_again_by_themselves_are_biased_towards_fast_prompts() -> None:
    """What the test above can tell: the same run, but the buffer is not told of the rollouts."""
    trained, info = asyncio.run(asyncio.wait_for(simulate(1, 1, 1, steps=240, told=False), 20))
    assert info.num_dropped > 0
    assert distance(trained) > 20


def test_a_rollout_that_begins_again_keeps_its_place_and_nobody_else_gets_it() -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(GROUP, max_policy_age=1)
        await buffer.generating(0)
        first, second = await buffer.admit(GROUP), await buffer.admit(GROUP)
        full = asyncio.ensure_future(buffer.admit(GROUP))
        again = await buffer.restart(first)
        assert (first, second, again) == (0, 1, 2)
        await buffer.add(*group(second))
        await buffer.add(*group(again))
        await asyncio.sleep(0)
        assert not full.done()  # its place was not given away
        assert groups_of(await buffer.sample(0)) == [str(again)]
        await buffer.generating(1)
        assert await asyncio.wait_for(full, 1) == 3
        assert groups_of(await buffer.sample(1)) == [str(second)]

    asyncio.run(scenario())


def test_the_trainer_waits_for_no_rollout_that_began_again_under_a_newer_version() -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(GROUP, max_policy_age=1)
        await buffer.generating(0)
        slow, fast = await buffer.admit(GROUP), await buffer.admit(GROUP)
        await buffer.add(*group(fast))
        assert groups_of(await buffer.sample(0)) == [str(fast)]
        await buffer.generating(1)
        following = await buffer.admit(GROUP)
        await buffer.add(*group(following, 1))
        waiting = asyncio.ensure_future(buffer.sample(1, wait=True))
        await asyncio.sleep(0.001)
        assert not waiting.done()  # "slow" would be too old at the next step
        slow = await buffer.restart(slow)
        assert groups_of(await asyncio.wait_for(waiting, 1)) == [str(following)]
        assert await buffer.sample(2) is None
        await buffer.add(*group(slow, 1))
        assert groups_of(await buffer.sample(2)) == [str(slow)]

    asyncio.run(scenario())


def test_a_group_that_nobody_is_to_bring_can_not_begin_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await started(tmp_path, batch_size=GROUP, max_policy_age=1)
        number = await buffer.admit(GROUP)
        with pytest.raises(ForgeError, match="question 7 can't be given up"):
            await buffer.restart(7)
        drain()
        again = await call("again", buffer.restart(number))
        with pytest.raises(ForgeError, match="given up before"):
            await buffer.restart(number)
        await buffer.add(*group(again))
        with pytest.raises(ForgeError, match="added already"):
            await buffer.restart(again)
        assert await call("again", buffer.restart(number)) == again  # repeated: it was answered before
        assert (await buffer.info()).num_restarted == 1
        assert drain()["buffer/num_restarted"].total == 1

    asyncio.run(scenario())


def test_a_run_in_which_no_group_is_of_use_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_buffer, "MAX_FUTILE", 3)

    async def scenario() -> None:
        buffer = ReplayBuffer(GROUP, max_policy_age=1)
        a, b = await buffer.admit(GROUP), await buffer.admit(GROUP)
        a, b = await buffer.restart(a), await buffer.restart(b)
        await buffer.add(*group(a))
        b = await buffer.restart(await buffer.restart(b))
        with pytest.raises(ForgeError, match="last 3 groups were given up, one after the other"):
            await buffer.restart(b)

    asyncio.run(scenario())
