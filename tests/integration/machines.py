"""Small actors for the tests of the controller; importable from the actors' processes."""

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from forge.controller import ForgeActor, call_id, endpoint
from forge.controller.journal import Journal
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


class Fragile(ForgeActor):
    """Breaks in every way that a process can."""

    def __init__(self, folder: str = "") -> None:
        self.folder = Path(folder)
        self.running = 0
        self.most_running = 0

    async def setup(self) -> None:
        if (self.folder / "no_more_starts").exists():
            raise ForgeError("the disk has no room")
        if (self.folder / "slow_starts").exists():
            await asyncio.sleep(1.5)

    @endpoint
    async def pid(self, seconds: float = 0) -> int:
        await asyncio.sleep(seconds)
        return os.getpid()

    @endpoint(retry=False)
    async def pid_once(self, seconds: float = 0) -> int:
        await asyncio.sleep(seconds)
        return os.getpid()

    @endpoint
    async def die(self) -> None:
        os._exit(7)

    @endpoint
    async def leave(self) -> None:
        sys.exit("enough")

    @endpoint
    async def block_once(self, seconds: float) -> int:
        """Holds up the event loop, the first time that any replica is asked."""
        try:
            (self.folder / "blocked").touch(exist_ok=False)
        except FileExistsError:
            return os.getpid()
        time.sleep(seconds)
        return os.getpid()

    @endpoint
    async def linger(self, name: str, seconds: float) -> None:
        """Leaves a file that says how it ended."""
        try:
            await asyncio.sleep(seconds)
            (self.folder / name).write_text("finished")
        except asyncio.CancelledError:
            (self.folder / name).write_text("cancelled")
            raise

    @endpoint
    async def count(self, seconds: float) -> int:
        """The most calls that ever ran here at a time."""
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(seconds)
        self.running -= 1
        return self.most_running


class Follower(ForgeActor):
    """Holds a value that all replicas share: the one that stands in a file."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.value = 0

    @property
    def weights_version(self) -> int:
        return self.value

    async def catch_up(self) -> None:
        self.value = int(self.file.read_text())

    @endpoint
    async def take(self, value: int) -> int:
        self.value = value
        return value

    @endpoint
    async def tell(self) -> tuple[int, int]:
        return os.getpid(), self.value


class Visitor(ForgeActor):
    """Uses a service from its own process."""

    def __init__(self, service: Any) -> None:
        self.service = service

    @endpoint
    async def visit(self, num_calls: int, seconds: float = 0) -> list[int]:
        return await asyncio.gather(*(self.service.pid.route(seconds) for _ in range(num_calls)))

    @endpoint
    async def stay(self, num_calls: int) -> set[int]:
        async with self.service.session():
            return set(await asyncio.gather(*(self.service.pid.route() for _ in range(num_calls))))

    @endpoint
    async def states(self) -> list[str]:
        return [replica.state.value for replica in await self.service.replicas()]

    @endpoint
    async def grow(self, num: int) -> int:
        await self.service.scale(num)
        return len(await self.service.pid.fanout())


class Ledgerkeeper(ForgeActor):
    """Remembers every call id in a journal: exactly once, whatever happens to its process."""

    recovers = True

    async def setup(self) -> None:
        self.journal = Journal(self.state_dir / "calls")
        self.seen = dict(self.journal.records)

    @endpoint(retry=True)
    async def deposit(self, amount: int) -> int:
        """The balance after it."""
        id = call_id()
        if id not in self.seen:
            self.seen[id] = amount
            self.journal.append((id, amount))
        return sum(self.seen.values())


class Squarer(ForgeActor):
    """Takes a moment for each answer."""

    @endpoint
    async def square(self, number: int) -> int:
        await asyncio.sleep(0.05)
        return number * number
