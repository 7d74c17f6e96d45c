"""What the registry does with volumes that fail and versions that are retired; the volumes are stubs."""

import asyncio
from typing import Any

import pytest

from forge.errors import ForgeError, WeightsMissing
from forge.weights.keys import PartKey
from forge.weights.process import Process
from forge.weights.registry import Reader, StoredPart
from forge.weights.registry_actor import RegistryActor


class Volumes:
    """Of these ids; remembers what was dropped, and forgets what is lost."""

    def __init__(self, *ids: str) -> None:
        self.ids = set(ids)
        self.silent: set[str] = set()
        self.dropped: list[str] = []

    def is_there(self, volume: str) -> bool:
        return volume in self.ids

    async def answers(self, volume: str) -> bool:
        return volume in self.ids - self.silent

    async def forget(self, volume: str, reason: str) -> None:
        self.ids.discard(volume)

    async def drop(self, prefixes: tuple[str, ...]) -> dict[str, Exception]:
        self.dropped += prefixes
        return {}


class Run:
    """The actor without Monarch around it."""

    def __init__(self, *volumes: str) -> None:
        self.actor = RegistryActor()
        self.volumes: Any = Volumes(*volumes)
        self.actor._volumes = self.volumes

    async def call(self, endpoint: str, *args: object) -> Any:
        return await getattr(RegistryActor, endpoint)._method.__wrapped__(self.actor, *args)

    async def publish(self, version: int, *volumes: str) -> list[PartKey]:
        """As many ranks as volumes; "" for one that only begins."""
        keys = []
        for rank, volume in enumerate(volumes):
            key = await self.call("begin", version, rank, len(volumes), "the trainer", Process.this())
            if volume:
                await self.call("publish", StoredPart(key, volume, b""))
            keys.append(key)
        return keys

    async def versions(self) -> tuple[list[int], list[int]]:
        return await self.call("versions")


def test_a_version_whose_push_has_just_failed_is_retired_at_once_and_pushed_again() -> None:
    async def scenario() -> None:
        run = Run("a")
        first, second = await run.publish(7, "a", "")
        await run.call("fail", second, "OSError: no room")
        await run.call("retire", 7, 30.0)
        new = await run.publish(7, "a")
        await asyncio.sleep(0)
        assert set(run.volumes.dropped) == {first.prefix, second.prefix} and new[0] not in (first, second)
        assert await run.versions() == ([7], [])

    asyncio.run(scenario())


def test_a_retire_that_waited_leaves_the_same_number_alone_that_was_pushed_meanwhile() -> None:
    async def scenario() -> None:
        run = Run("a", "b")
        [old] = await run.publish(7, "a")
        await run.call("hold", 7, Reader(Process.this(), 0), 0.0)
        retiring = asyncio.create_task(run.call("retire", 7, 30.0))
        await asyncio.sleep(0.01)
        await run.actor._lose("a", "its process is gone")
        [new] = await run.publish(7, "b")
        await asyncio.wait_for(retiring, 1.0)
        assert await run.versions() == ([7], [])
        assert set(run.volumes.dropped) == {old.prefix} and old.prefix != new.prefix

    asyncio.run(scenario())


def test_what_is_published_into_a_version_that_is_being_retired_is_deleted() -> None:
    async def scenario() -> None:
        run = Run("a")
        _, second = await run.publish(7, "a", "")
        run.actor._registry.start_retiring(7)
        with pytest.raises(WeightsMissing, match="is being retired"):
            await run.call("publish", StoredPart(second, "a", b""))
        await asyncio.sleep(0)
        assert run.volumes.dropped == [second.prefix]

    asyncio.run(scenario())


def test_a_volume_is_lost_only_if_it_does_not_answer_the_registry_either() -> None:
    async def scenario() -> None:
        run = Run("a")
        await run.publish(7, "a")
        assert not await run.call("lost", "a", "process 4711 gets no answer")
        assert await run.versions() == ([7], [])
        run.volumes.silent.add("a")
        assert await run.call("lost", "a", "process 4711 gets no answer")
        assert await run.versions() == ([], [])
        with pytest.raises(WeightsMissing, match="version 7 .* is lost: .*process 4711 gets no answer"):
            await run.call("hold", 7, Reader(Process.this(), 0), 30.0)

    asyncio.run(scenario())


def test_an_open_store_is_not_opened_again() -> None:
    with pytest.raises(ForgeError, match="a weight store is open"):
        asyncio.run(Run("a").call("open_store", None))
