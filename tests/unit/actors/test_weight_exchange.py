"""Which version a generator holds after updates that come late, twice, or are given up."""

import asyncio
import logging
from typing import Any, cast

import pytest

from forge.actors._vllm.engine_loop import EngineLoop
from forge.actors._vllm.exchange import WeightExchange
from forge.controller import ForgeActor
from forge.errors import ReplicaUnfit, WeightsMismatch, WeightsMissing


class IdleEngine:
    """Takes any weights but those of version 13."""

    def __init__(self) -> None:
        self.version = 0
        self.loads: list[int] = []

    def step(self) -> list[Any]:
        return []

    def load(self, version: int) -> None:
        if version == 13:
            raise WeightsMismatch("version 13 doesn't fit")
        self.loads.append(version)
        self.version = version


class Store:
    """Versions that may be retired as soon as they have been listed."""

    def __init__(self, *complete: int) -> None:
        self.complete = list(complete)
        self.retire_when_listed: dict[int, list[int]] = {}  # version -> what is complete then
        self.lost: tuple[int, str] | None = None
        self.num_lists = 0
        self.staged: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def versions(self) -> list[int]:
        self.num_lists += 1
        listed = self.complete
        self.complete = self.retire_when_listed.pop(max(listed, default=0), listed)
        return listed

    async def newest_lost(self) -> tuple[int, str] | None:
        return self.lost

    async def stage(self, version: int, timeout_s: float) -> None:
        await self.gate.wait()
        if version not in self.complete:
            raise WeightsMissing(f"version {version} isn't in the store after {timeout_s:g} s")
        self.staged.append(version)


class Replica:
    def __init__(self, store: Store) -> None:
        self.engine = IdleEngine()
        self.loop = EngineLoop(cast(Any, self.engine), ForgeActor().run_blocking)
        self.exchange = WeightExchange(
            cast(Any, self.engine),
            self.loop,
            store.stage,
            store.versions,
            store.newest_lost,
            name="policy[1]",
        )


def test_it_catches_up_with_the_newest_version_and_then_only_looks() -> None:
    async def scenario() -> None:
        store = Store(3, 4)
        replica = Replica(store)
        assert await replica.exchange.catch_up() == 4
        assert await replica.exchange.catch_up() == 4
        assert store.staged == replica.engine.loads == [4]
        store.complete = []
        assert await replica.exchange.catch_up() == 4, "it keeps what it has when the store is empty"

    asyncio.run(scenario())


def test_before_anything_is_published_the_folder_is_version_0() -> None:
    async def scenario() -> None:
        for store in (Store(), Store(0)):
            assert await Replica(store).exchange.catch_up() == 0
            assert store.staged == []

    asyncio.run(scenario())


def test_it_does_not_serve_older_weights_than_those_that_are_lost_unless_it_holds_them() -> None:
    async def scenario() -> None:
        for store in (Store(), Store(39)):
            fresh = Replica(store)
            store.lost = (40, "the volume of host a is gone")
            with pytest.raises(WeightsMissing, match="version 40 .*is lost: the volume of host a is gone"):
                await fresh.exchange.catch_up()
        store.complete = [39, 41]
        assert await fresh.exchange.catch_up() == 41, "the next push mends it"
        store.complete, store.lost = [], (41, "that of host b too")
        assert await fresh.exchange.catch_up() == 41, "it has what is lost"

    asyncio.run(scenario())


def test_a_version_that_is_retired_after_it_was_listed_gives_way_to_the_next_list() -> None:
    async def scenario() -> None:
        store = Store(4)
        store.retire_when_listed = {4: [5, 6], 6: [7, 8]}
        assert await Replica(store).exchange.catch_up() == 8
        assert store.staged == [8]
        store = Store(4)
        store.retire_when_listed = {4: []}
        assert await Replica(store).exchange.catch_up() == 0

    asyncio.run(scenario())


def test_a_version_that_is_listed_but_can_not_be_had_is_an_error() -> None:
    class Broken(Store):
        async def stage(self, version: int, timeout_s: float) -> None:
            raise WeightsMissing("the shared memory was freed")

    async def scenario() -> None:
        with pytest.raises(WeightsMissing, match="freed"):
            await Replica(Broken(2)).exchange.catch_up()
        with pytest.raises(WeightsMismatch, match="version 13"):
            await Replica(Store(13)).exchange.catch_up()

    asyncio.run(scenario())


def test_an_update_that_is_repeated_or_overtaken_loads_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store = Store(1, 2)
        replica = Replica(store)
        answers = await asyncio.gather(*(replica.exchange.update(2) for _ in range(3)))
        assert answers == [2, 2, 2] and replica.engine.loads == [2]
        assert not caplog.messages
        assert await replica.exchange.update(1) == 2
        assert caplog.messages == ["update to version 1 of the weights was overtaken: keeping 2"]
        assert store.staged == [2]

    with caplog.at_level(logging.INFO, "forge"):
        asyncio.run(scenario())


def test_an_update_whose_caller_gives_up_is_carried_to_its_end_before_the_next_begins() -> None:
    async def scenario() -> None:
        store = Store(1, 2)
        replica = Replica(store)
        store.gate.clear()
        first = asyncio.create_task(replica.exchange.update(1))
        second = asyncio.create_task(replica.exchange.update(2))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.01)
        assert not first.done()
        store.gate.set()
        assert await second == 2
        assert first.cancelled() and replica.engine.loads == [1, 2]

    asyncio.run(scenario())


def test_weights_that_do_not_fit_fence_it_off_until_it_holds_others() -> None:
    async def scenario() -> None:
        store = Store(11, 12, 13)
        replica = Replica(store)
        await replica.exchange.update(12)
        with pytest.raises(WeightsMismatch, match=r"policy\[1\]: version 13"):
            await replica.exchange.update(13)
        assert replica.exchange.held is None
        with pytest.raises(ReplicaUnfit, match=r"policy\[1\]: version 13 doesn't fit"):
            await replica.loop.generate([1], cast(Any, None))
        with pytest.raises(WeightsMissing):
            await replica.exchange.update(14)
        with pytest.raises(ReplicaUnfit):
            await replica.loop.generate([1], cast(Any, None))
        for version in (11, 12):
            assert await replica.exchange.update(version) == version, "also the one that it held"
            assert replica.exchange.held == version

    asyncio.run(scenario())
