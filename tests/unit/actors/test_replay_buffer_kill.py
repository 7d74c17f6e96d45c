"""ReplayBuffer, killed: nothing is lost, and a call that is repeated has its effect once."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.actors.buffer import history
from forge.actors.replay_buffer import ReplayBuffer
from forge.controller import journal
from forge.controller.call import serving
from forge.data_models import Completion, Episode
from forge.errors import ForgeError

IDS, LOGPROBS = torch.tensor([1, 2]), torch.tensor([-0.5, -1.0])  # shared, which saves time


def episode(name: str, version: int = 0, token_ids: torch.Tensor = IDS) -> Episode:
    c = Completion(
        text="",
        token_ids=token_ids,
        logprobs=LOGPROBS if token_ids is IDS else torch.full(token_ids.shape, -0.5),
        prompt_ids=IDS,
        generator_version=version,
    )
    return Episode(name, "group", c, "", 1.0, 0.0)


def ids(batch: Any) -> list[str]:
    return [name for targets in batch[1] for name in targets.episode_ids]


async def started(folder: Path, **arguments: Any) -> ReplayBuffer:
    """A new process in the place of the one before."""
    buffer = ReplayBuffer(**arguments)
    buffer.state_dir = folder
    await buffer.setup()
    return buffer


async def call(id: str, work: Coroutine[Any, Any, Any]) -> Any:
    with serving(id):
        return await work


def test_a_repeated_batch_is_the_same_tensor_for_tensor(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"batch_size": 2, "max_policy_age": 1, "dp_size": 2, "normalize_advantages": True}
        buffer = await started(tmp_path, **settings)
        texts = [episode(str(i), token_ids=torch.arange(i + 1)) for i in range(6)]
        await buffer.add(*(replace(e, advantage=torch.rand(i + 1)) for i, e in enumerate(texts)))
        before = await call("c", buffer.sample(0))
        buffer = await started(tmp_path, **settings)
        after = await call("c", buffer.sample(0))
        for old, new in zip((*before[0], *before[1]), (*after[0], *after[1]), strict=True):
            for name in old.__slots__:
                one, other = getattr(old, name), getattr(new, name)
                assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name
        assert sorted(ids(after)) == ["0", "1", "2", "3"]
        assert await buffer.size() == 2

    asyncio.run(scenario())


def test_a_call_that_is_cancelled_while_it_waits_has_taken_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await started(tmp_path, batch_size=2, max_policy_age=0)
        await call("b", buffer.add(episode("0")))
        await call("a", buffer.admit(2))
        before = await buffer.info()
        for id, work in (("c", buffer.admit(1)), ("d", buffer.sample(0, wait=True))):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call(id, work), 0.01)
        assert await buffer.info() == before
        buffer = await started(tmp_path, batch_size=2, max_policy_age=0)
        assert await buffer.info() == before
        await buffer.add(replace(episode("1"), group_id="0"))
        assert ids(await call("d", buffer.sample(0, wait=True))) == ["1", "0"]  # group "0" before "group"

    asyncio.run(scenario())


def test_a_call_that_arrives_twice_at_once_has_one_effect(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await started(tmp_path, batch_size=1, max_policy_age=0)
        twice = [asyncio.ensure_future(call("a", buffer.sample(0, wait=True))) for _ in range(2)]
        await asyncio.sleep(0)
        await buffer.add(episode("0"), episode("1"))
        assert [ids(batch) for batch in await asyncio.gather(*twice)] == [["0"], ["0"]]
        assert await buffer.size() == 1

    asyncio.run(scenario())


def test_an_episode_that_is_stale_when_it_comes_leaves_room_for_another() -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(batch_size=1, max_policy_age=0)
        old = await buffer.admit(1)
        waiting = asyncio.ensure_future(buffer.sample(5, wait=True))
        await asyncio.sleep(0)
        admitting = asyncio.ensure_future(buffer.admit(1))
        await asyncio.sleep(0)
        assert not admitting.done()
        await buffer.add(replace(episode("old", version=4), group_id=str(old)))
        new = await asyncio.wait_for(admitting, 1)
        await buffer.add(replace(episode("new", version=5), group_id=str(new)))
        assert ids(await waiting) == ["new"]
        assert (await buffer.info()).num_dropped == 1

    asyncio.run(scenario())


def test_a_batch_that_is_kept_no_more_is_refused_rather_than_replaced(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await started(tmp_path, batch_size=1, max_policy_age=0)
        await buffer.add(*(episode(str(i)) for i in range(10)))
        for i in range(history.REMEMBERED_BATCHES + 1):
            await call(f"c{i}", buffer.sample(0))
        with pytest.raises(ForgeError, match="call c0 .* no longer kept"):
            await call("c0", buffer.sample(0))
        assert await buffer.size() == 9 - history.REMEMBERED_BATCHES

    asyncio.run(scenario())


def test_ids_that_are_used_twice_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        buffer = ReplayBuffer(batch_size=1, max_policy_age=0)
        await buffer.add(episode("same"), episode("same"))
        assert await buffer.size() == 1

    asyncio.run(scenario())
    assert "1 of the 2 episodes of group group" in caplog.text


def test_a_slice_of_a_large_tensor_does_not_bring_the_rest_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await started(tmp_path, batch_size=1, max_policy_age=0)
        await buffer.add(episode("0", token_ids=torch.arange(10**6)[5:10]))

    asyncio.run(scenario())
    assert (tmp_path / "replay_buffer.journal").stat().st_size < 10_000


def test_a_long_run_leaves_a_short_journal_and_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SMALL_BYTES", 50_000)
    monkeypatch.setattr(history, "REMEMBERED_CALLS", 50)
    monkeypatch.setattr(history, "REMEMBERED_EPISODES", 100)
    file = tmp_path / "replay_buffer.journal"

    async def scenario() -> None:
        buffer = await started(tmp_path, batch_size=2, max_policy_age=1)
        longest = 0
        for step in range(1000):
            assert await call(f"{step}/a", buffer.admit(2)) == step
            group = (replace(episode(f"{step}/{i}", step), group_id=str(step)) for i in range(2))
            await call(f"{step}/b", buffer.add(*group))
            batch = await call(f"{step}/c", buffer.sample(step, wait=True))
            assert ids(batch) == [f"{step}/0", f"{step}/1"]
            longest = max(longest, file.stat().st_size)
        assert longest < 60_000
        buffer = await started(tmp_path, batch_size=2, max_policy_age=1)
        assert ids(await call("999/c", buffer.sample(999))) == ["999/0", "999/1"]
        info = await buffer.info()
        assert (info.num_added, info.num_sampled, info.num_waiting) == (2000, 2000, 0)

    asyncio.run(scenario())


def test_rollouts_that_were_let_in_and_the_version_that_generates_are_remembered(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"batch_size": 1, "max_policy_age": 1}
        buffer = await started(tmp_path, **settings)
        await call("0", buffer.generating(0))
        slow = await call("1", buffer.admit(1))
        fast = await call("2", buffer.admit(1))
        await buffer.add(replace(episode("fast", 1), group_id=str(fast)))
        assert await call("3", buffer.sample(1)) is None  # "slow" would be too old for the step after it
        buffer = await started(tmp_path, **settings)
        assert await call("3", buffer.sample(1)) is None
        assert [await call(id, buffer.admit(1)) for id in "12"] == [slow, fast]  # they were answered before
        waiting = asyncio.ensure_future(call("4", buffer.admit(1)))  # two of version 0 are enough
        await buffer.add(replace(episode("last", 0), group_id=str(slow)))
        assert ids(await call("3", buffer.sample(1))) == ["last"]
        assert ids(await call("5", buffer.sample(2))) == ["fast"]
        assert not waiting.done()
        await buffer.generating(2)
        assert await asyncio.wait_for(waiting, 1) == 2

    asyncio.run(scenario())
