"""ReplayBuffer: numbers of questions, its state out and in, the bound, room, and who waits for what."""

import asyncio
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge.actors.replay_buffer import ReplayBuffer
from forge.data_models import Episode
from forge.errors import ConfigError
from tests.unit.actors.test_replay_buffer_kill import call, episode, ids, started


def group(name: int | str, version: int = 0, size: int = 2, advantage: float = 0.0) -> list[Episode]:
    members = (episode(f"{name}/{i}", version) for i in range(size))
    return [replace(e, group_id=str(name), advantage=advantage) for e in members]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("dp_size", [1, 2])  # a resumed run may have another layout
def test_from_a_state_numbers_under_way_are_handed_out_again_and_all_goes_on(
    tmp_path: Path, dp_size: int
) -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(batch_size=4, max_policy_age=1)
        await buffer.generating(0)
        assert [await buffer.admit(2) for _ in range(4)] == [0, 1, 2, 3]
        assert await buffer.restart(1) == 4
        await buffer.add(*group(3))
        await buffer.add(*group(0))
        assert ids(await buffer.sample(0)) == ["0/0", "0/1", "3/0", "3/1"]
        await buffer.add(*group("free"))
        await buffer.bound(0)
        state = pickle.loads(pickle.dumps(await buffer.state_dict()))
        await buffer.add(*group(4))  # of this the state knows nothing

        settings = {"batch_size": 4 // dp_size, "max_policy_age": 1, "dp_size": dp_size}
        buffer = await started(tmp_path, **settings)
        await call("load", buffer.load_state_dict(state))
        assert await buffer.sampled() == []
        await buffer.add(*group(3), *group("free"))  # trained on, and waiting: known by their ids
        info = await buffer.info()
        assert (info.next_number, info.num_running, info.num_waiting, info.num_repeated) == (5, 2, 2, 4)
        assert await call("a", buffer.admit(2)) == 2
        buffer = await started(tmp_path, **settings)
        assert await call("a", buffer.admit(2)) == 2
        assert await call("b", buffer.admit(2)) == 4
        third = asyncio.ensure_future(call("c", buffer.admit(2)))
        await buffer.generating(1)
        await settle()
        assert not third.done()  # the bound is of the state, too: both places of step 1 are taken
        await buffer.add(*group(4, 1))
        await buffer.add(*group(2, 1))
        # "free" is of the older policy, and 4 has the place of 1, where it was restarted
        assert sorted(ids(await buffer.sample(1))) == ["4/0", "4/1", "free/0", "free/1"]
        await buffer.bound(1)
        assert await asyncio.wait_for(third, 1) == 5

    asyncio.run(scenario())


def test_a_group_that_brings_less_than_it_was_let_in_for_leaves_no_place_taken() -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(batch_size=2, max_policy_age=0)
        await buffer.add(*group("free"))
        number = await buffer.admit(2)
        waiting = asyncio.ensure_future(buffer.admit(2))
        await settle()
        assert not waiting.done()
        await buffer.add(*(replace(e, group_id=str(number)) for e in group("free")))
        assert await asyncio.wait_for(waiting, 1) == 1

    asyncio.run(scenario())


def test_a_batch_depends_on_its_set_of_episodes_alone_and_comes_again_as_it_was_trained() -> None:
    async def batch(order: list[int]) -> tuple[Any, list[Episode]]:
        buffer = ReplayBuffer(6, 1, dp_size=2, normalize_advantages=True)
        for number in order:
            await buffer.add(*group(number, size=3, advantage=float(number**2)))
        return await buffer.sample(0, minibatches=2), await buffer.sampled()

    first, episodes = asyncio.run(batch([0, 2, 10, 9]))
    second, _ = asyncio.run(batch([10, 9, 2, 0]))
    names = [[targets.episode_ids for targets in part[1]] for part in first]
    assert names == [[targets.episode_ids for targets in part[1]] for part in second]
    assert [{id.split("/")[0] for rank in part for id in rank} for part in names] == [{"0", "2"}, {"9", "10"}]
    assert [sum(len(rank) for rank in part) for part in names] == [6, 6]
    assert [e.episode_id for e in episodes] == [f"{n}/{i}" for n in (0, 2, 9, 10) for i in range(3)]
    trained = {
        id: float(advantage)
        for part in first
        for targets in part[1]
        for id, advantage in zip(targets.episode_ids, targets.advantages, strict=True)
    }
    assert trained == pytest.approx({e.episode_id: e.advantage for e in episodes})
    assert sum(trained.values()) == pytest.approx(0, abs=1e-5)


def test_newest_and_prioritized_prefer_as_they_say_where_nothing_is_urgent() -> None:
    async def order(strategy: Any) -> list[str]:
        buffer = ReplayBuffer(batch_size=2, max_policy_age=9, strategy=strategy)
        for number, (version, advantage) in enumerate([(1, 0.5), (0, -2.0), (2, 1.0)]):
            await buffer.add(*group(number, version, advantage=advantage))
        return [ids(await buffer.sample(2))[0].split("/")[0] for _ in range(3)]

    assert asyncio.run(order("oldest")) == ["1", "0", "2"]
    assert asyncio.run(order("newest")) == ["2", "0", "1"]
    assert asyncio.run(order("prioritized")) == ["1", "2", "0"]


def test_who_waits_is_let_in_in_order_and_a_bound_lets_in_less() -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(batch_size=2, max_policy_age=2)
        await buffer.bound(0)
        admitted: list[tuple[int, int]] = []  # caller and number

        async def roll(caller: int) -> None:
            admitted.append((caller, await buffer.admit(2)))

        callers = [asyncio.ensure_future(roll(i)) for i in range(50)]
        await settle()
        assert admitted == [(0, 0)]
        callers[1].cancel()
        callers[2].cancel()
        await buffer.bound(2)
        await settle()
        assert admitted == [(0, 0), (3, 1), (4, 2)]
        for caller in callers:
            caller.cancel()

    with pytest.raises(ConfigError, match="from sync_interval - 1 = 0 to the hard limit max_policy_age = 2"):
        asyncio.run(ReplayBuffer(batch_size=2, max_policy_age=2).bound(3))
    asyncio.run(scenario())


def test_a_full_buffer_keeps_strangers_waiting_but_nobody_who_was_let_in() -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(batch_size=2, max_policy_age=1, max_episodes=4)
        number = await buffer.admit(2)
        await buffer.add(*group("a"), *group("b"))
        stranger = asyncio.ensure_future(buffer.add(*group("c")))
        await settle()
        assert not stranger.done()
        await asyncio.wait_for(buffer.add(*group(number)), 1)
        assert await buffer.size() == 6
        await buffer.sample(0)
        await buffer.sample(0)
        await asyncio.wait_for(stranger, 1)
        assert await buffer.size() == 4

    with pytest.raises(ConfigError, match="max_episodes=1 is less than the 2 episodes of a batch"):
        ReplayBuffer(batch_size=2, max_policy_age=1, max_episodes=1)
    asyncio.run(scenario())


@pytest.mark.parametrize("reuse", [1, 2])
def test_a_full_buffer_always_has_a_batch_however_large_groups_are(reuse: int) -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(batch_size=4, max_policy_age=1, reuse=reuse, max_episodes=4)

        async def strangers() -> None:
            for name in "abcdefgh":
                await buffer.add(*group(name, version=1, size=3))
            await buffer.add(*group("huge", version=1, size=9))

        adding = asyncio.ensure_future(strangers())
        for _ in range(6):
            await asyncio.wait_for(buffer.sample(1, wait=True), 1)
            await settle()
            assert (await buffer.info()).num_waiting <= 6 or adding.done()
        await asyncio.wait_for(adding, 1)
        with pytest.raises(ConfigError, match="max_episodes=4 is less than the 5 episodes of a batch"):
            await buffer.sample(1, batch_size=5, wait=True)

    asyncio.run(scenario())


def test_ready_takes_nothing_and_a_sample_after_it_need_not_wait() -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(batch_size=2, max_policy_age=1)
        ready = asyncio.ensure_future(buffer.ready(1))
        sample = asyncio.ensure_future(buffer.sample(1, wait=True))  # behind it
        await settle()
        assert not ready.done()
        await buffer.add(*group("a", 1))
        await asyncio.wait_for(ready, 1)
        assert ids(await asyncio.wait_for(sample, 1)) == ["a/0", "a/1"]

    asyncio.run(scenario())


def test_an_episode_is_used_again_at_another_version_and_never_after_its_age() -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(batch_size=2, max_policy_age=1, reuse=2)
        await buffer.add(*group("a"))
        assert ids(await buffer.sample(0)) == ["a/0", "a/1"]
        assert await buffer.sample(0) is None
        state = await buffer.state_dict()
        buffer = ReplayBuffer(batch_size=2, max_policy_age=1, reuse=2)
        await buffer.load_state_dict(state)
        assert await buffer.sample(0) is None
        await buffer.add(*group("c"))
        assert ids(await buffer.sample(0)) == ["c/0", "c/1"]
        assert ids(await buffer.sample(1)) == ["a/0", "a/1"]
        assert await buffer.size() == 0  # "c" is too old for the next version
        await buffer.add(*group("b", 1))
        assert ids(await buffer.sample(2)) == ["b/0", "b/1"]
        assert await buffer.sample(3) is None
        await buffer.add(*group("b", 3))  # its second use has lapsed: still it is known
        assert (await buffer.info()).num_repeated == 2

    with pytest.raises(ConfigError, match="reuse=3 must be from 1 to max_policy_age"):
        ReplayBuffer(batch_size=2, max_policy_age=1, reuse=3)
    asyncio.run(scenario())


def test_minibatches_that_can_not_be_equal_are_refused() -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(batch_size=4, max_policy_age=1)
        await buffer.add(*group("a", size=4))
        with pytest.raises(ConfigError, match="4 episodes can't be split into 3 minibatches"):
            await buffer.sample(0, minibatches=3)
        assert await buffer.size() == 4

    asyncio.run(scenario())
