"""ReplayBuffer: order, age, admission. The actor is used as a plain object."""

import asyncio
from dataclasses import replace

import pytest
import torch

from forge.actors.replay_buffer import ReplayBuffer
from forge.data_models import Completion, Episode
from forge.errors import ConfigError


def episode(number: int, version: int = 0, length: int = 1) -> Episode:
    c = Completion(
        text="",
        token_ids=torch.full((length,), number),
        logprobs=torch.full((length,), -1.0),
        prompt_ids=torch.tensor([1]),
        generator_version=version,
    )
    return Episode(str(number), "group", c, "", 1.0, 0.0)


def ids(batch: tuple | None) -> list[list[str]]:
    assert batch is not None
    return [targets.episode_ids for targets in batch[1]]


def test_batches_come_oldest_first_shared_out_evenly() -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(batch_size=2, max_policy_age=1, dp_size=2)
        await buffer.add(*(episode(i) for i in range(3)))
        assert await buffer.sample(curr_policy_version=0) is None
        assert await buffer.size() == 3
        await buffer.add(episode(3), episode(4), episode(5))
        assert ids(await buffer.sample(curr_policy_version=0)) == [["0", "1"], ["2", "3"]]
        assert ids(await buffer.sample(curr_policy_version=0, batch_size=1)) == [["4"], ["5"]]

    asyncio.run(scenario())


def test_an_episode_past_its_age_is_never_handed_out() -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(batch_size=1, max_policy_age=1)
        await buffer.add(episode(0, version=0), episode(1, version=2), episode(2, version=3))
        assert ids(await buffer.sample(curr_policy_version=3)) == [["1"]]
        assert ids(await buffer.sample(curr_policy_version=4)) == [["2"]]
        assert await buffer.size() == 0

    asyncio.run(scenario())


def test_sample_waits_when_asked_to() -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(batch_size=1, max_policy_age=0)
        waiting = asyncio.ensure_future(buffer.sample(curr_policy_version=0, wait=True))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await buffer.add(episode(7))
        assert ids(await asyncio.wait_for(waiting, 1)) == [["7"]]

    asyncio.run(scenario())


@pytest.mark.parametrize(("max_age", "sync_interval"), [(0, 1), (1, 1), (3, 1), (1, 2), (4, 3)])
def test_what_is_admitted_is_always_trained_and_never_older_than_the_bound(
    max_age: int, sync_interval: int
) -> None:
    """A simulated run: rollouts start whenever they are let in, and finish at once."""

    async def scenario() -> None:
        per_step = 4
        buffer = ReplayBuffer(per_step, max_age, sync_interval=sync_interval, num_steps=12)
        admitted: list[int] = []
        generator_version = 0

        async def roll() -> None:
            while True:
                number = await buffer.admit(1)
                assert number == len(admitted)
                admitted.append(generator_version)
                await buffer.add(replace(episode(number, generator_version), group_id=str(number)))

        roller = asyncio.ensure_future(roll())
        for step in range(1, 13):
            batch = await asyncio.wait_for(buffer.sample(curr_policy_version=step - 1, wait=True), 1)
            [numbers] = ids(batch)
            assert numbers == [
                str(i) for i in range((step - 1) * per_step, step * per_step)
            ]  # none was dropped
            assert all(step - 1 - admitted[int(i)] <= max_age for i in numbers)
            if step % sync_interval == 0:
                generator_version = step
            await asyncio.sleep(0.001)
        roller.cancel()
        assert len(admitted) == 12 * per_step  # what no step would train on is not begun

    asyncio.run(scenario())


@pytest.mark.parametrize("reuse", [1, 2])
def test_the_last_steps_have_all_they_need_though_groups_do_not_fill_them_evenly(reuse: int) -> None:
    async def scenario() -> int:
        buffer = ReplayBuffer(4, 2, num_steps=5, reuse=reuse)
        numbers: list[int] = []

        async def roll() -> None:
            while True:
                numbers.append(number := await buffer.admit(3))
                added = [replace(episode(3 * number + i, 9), group_id=str(number)) for i in range(3)]
                await buffer.add(*added)

        roller = asyncio.ensure_future(roll())
        for version in range(5):
            await asyncio.wait_for(buffer.sample(curr_policy_version=version, wait=True), 1)
            await asyncio.sleep(0.001)
        roller.cancel()
        return len(numbers)

    num_groups = asyncio.run(scenario())
    assert num_groups == 7 if reuse == 1 else num_groups <= 7  # 20 episodes in groups of 3


@pytest.mark.parametrize("per_token", [False, True])
def test_advantages_are_whitened_over_the_batch_of_all_ranks(per_token: bool) -> None:
    async def scenario() -> None:
        given = [torch.arange(i + 1.0) * i - 2 if per_token else float(i**2) for i in range(6)]
        buffer = ReplayBuffer(batch_size=2, max_policy_age=1, dp_size=2, normalize_advantages=True)
        for i, advantage in enumerate(given):
            await buffer.add(replace(episode(i, length=i + 1), group_id=f"{i}", advantage=advantage))
        batch = await buffer.sample(0)
        taken = [torch.as_tensor(a).double().flatten() for a in given[:4]]  # what is left does not count
        std, mean = torch.std_mean(torch.cat(taken), correction=0)
        assert batch is not None and len(batch[1]) == 2
        for targets in batch[1]:
            assert targets.advantages.dtype == torch.float32
            for row, id in enumerate(targets.episode_ids):
                got = (
                    targets.advantages[row][targets.loss_mask[row]] if per_token else targets.advantages[row]
                )
                expected = (taken[int(id)] - mean) / (std + 1e-4)
                torch.testing.assert_close(got.double().flatten(), expected, rtol=1e-6, atol=1e-6)

    asyncio.run(scenario())


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 0, 1 and 1"):
        ReplayBuffer(batch_size=0, max_policy_age=1)
    with pytest.raises(ConfigError, match="max_policy_age=1 is too small for sync_interval=3"):
        ReplayBuffer(batch_size=1, max_policy_age=1, sync_interval=3)
