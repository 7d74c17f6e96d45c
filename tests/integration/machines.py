"""Small actors for the tests of the controller; importable from the actors' processes."""

import asyncio
import os
import threading

from forge.controller import ForgeActor, endpoint
from forge.errors import ForgeError
from forge.observability.metrics import record


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Counter(ForgeActor):
    """Adds up, waits, fails on request."""

    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ForgeError(f"start must not be negative, got {start}")
        self.value = start

    async def setup(self) -> None:
        if self.value == 13:
            raise ForgeError("13 brings bad luck")

    @endpoint
    async def add(self, amount: int = 1) -> int:
        self.value += amount
        record("counter", num_added=amount)
        return self.value

    @endpoint
    async def wait(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return os.getpid()

    @endpoint
    async def where(self) -> tuple[int, int, int]:
        return self.rank, self.world_size, os.getpid()

    @endpoint
    async def environment(self, key: str) -> str | None:
        return os.environ.get(key)

    @endpoint
    async def fail(self, kind: str) -> None:
        raise {"value": ValueError("no such thing"), "unpicklable": Unpicklable()}[kind]

    @endpoint
    async def fail_above(self, limit: int) -> int:
        if self.value > limit:
            raise ValueError(f"{self.value} is over {limit}")
        return self.value

    @endpoint
    async def add_at(self, other: "ForgeActor", amount: int) -> int:
        return await other.add.call_one(amount)


class Driver(ForgeActor):
    """Rank 0 drives its peers."""

    driver_only = True

    @endpoint
    async def ranks(self) -> list[int]:
        return [rank for _, rank in (await self.peers.rank_of.call()).items()]

    @endpoint
    async def rank_of(self) -> int:
        return self.rank
