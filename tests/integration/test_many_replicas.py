"""64 replicas, a process each: started, called, killed and stopped; nothing of them stays behind."""

import asyncio
import gc
import itertools
import os
import random
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest

from forge.controller import ForgeActor, endpoint
from tests.integration.test_services import children, healed, in_runtime, until

NUM_CALLERS = 64
AT_ONCE = 16  # starts: Monarch gives a process 30 s, and 64 share what cores a busy machine has left


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_64_replicas_answer_10000_calls_outlive_8_kills_and_leave_nothing() -> None:
    async def scenario() -> None:
        await cycle(num_replicas=2, num_calls=1000, num_kills=1)  # Monarch opens some things once
        small = Footprint.now()
        await cycle(num_replicas=64, num_calls=10_000, num_kills=8)
        large = Footprint.now()
        await cycle(num_replicas=8, num_calls=5000, num_kills=2)
        again = Footprint.now()
        told = f"{small}, after 64 replicas {large}, after 8 more {again}"
        print(told)
        assert large.num_files <= small.num_files + 5 and again.num_files <= large.num_files + 2, told
        assert large.num_tasks == again.num_tasks == small.num_tasks, told
        # Monarch itself keeps 0.4 MB of every process and 1 kB of every message that there was
        assert large.resident_mb < small.resident_mb + 130 and again.resident_mb < large.resident_mb + 40, (
            told
        )

    in_runtime(scenario)


async def cycle(*, num_replicas: int, num_calls: int, num_kills: int) -> None:
    """The life of one service."""
    before = children()
    started = time.perf_counter()
    service = await answerer().options(num_replicas=min(num_replicas, AT_ONCE)).as_service()
    for num in range(2 * AT_ONCE, num_replicas + 1, AT_ONCE):
        await service.scale(num)
    pids = {pid for replica in await service.replicas() for pid in replica.pids}
    assert len(pids) == num_replicas
    started = tell(f"{num_replicas} replicas started", started)

    numbers = iter(range(num_calls))
    asked_by_all = [ask(service, numbers) for _ in range(NUM_CALLERS)]
    answered = list(itertools.chain.from_iterable(await asyncio.gather(*asked_by_all)))
    assert len(answered) == num_calls and set(answered) == pids
    started = tell(f"{num_calls} calls", started)

    async with asyncio.TaskGroup() as group:
        are_over = asyncio.Event()
        numbers = itertools.takewhile(lambda _: not are_over.is_set(), itertools.count())
        traffic = [group.create_task(ask(service, numbers, pause_s=0.1)) for _ in range(NUM_CALLERS)]
        victims = random.Random(0).sample(sorted(pids), num_kills)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        newcomers = {pid for replica in await replaced(service, num_kills) for pid in replica.pids} - pids
        assert len(newcomers) == num_kills
        await asyncio.sleep(1)  # for them to be asked too
        are_over.set()
    answered = list(itertools.chain.from_iterable(task.result() for task in traffic))
    assert newcomers <= set(answered)
    started = tell(f"{num_kills} killed and replaced during {len(answered)} calls", started)

    await service.shutdown()
    await until(lambda: children() == before)
    tell("stopped", started)


async def replaced(service: Any, num: int) -> list[Any]:
    """The replicas, once so many of them have been replaced."""
    deadline = time.perf_counter() + 90
    while sum(replica.restarts for replica in await service.replicas()) < num:
        assert time.perf_counter() < deadline, await service.replicas()
        await asyncio.sleep(0.1)
    await healed(service, 90)
    return await service.replicas()


def answerer() -> type[ForgeActor]:
    """A class that travels by value: processes that need not import this file start faster."""

    class Answerer(ForgeActor):
        @endpoint
        async def square(self, number: int) -> tuple[int, int]:
            return number * number, os.getpid()

    return Answerer


async def ask(service: Any, numbers: Any, pause_s: float = 0.0) -> list[int]:
    """The pids of those that answered."""
    pids = []
    for number in numbers:
        square, pid = await service.square.route(number)
        assert square == number * number
        pids.append(pid)
        await asyncio.sleep(pause_s)
    return pids


@dataclass(frozen=True, slots=True)
class Footprint:
    """What this process holds."""

    num_files: int
    num_tasks: int
    resident_mb: float

    @classmethod
    def now(cls) -> "Footprint":
        gc.collect()
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        num_files = len(os.listdir("/proc/self/fd"))
        return cls(num_files, len(asyncio.all_tasks()), pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


def tell(what: str, started: float) -> float:
    now = time.perf_counter()
    print(f"{what} in {now - started:.1f} s")
    return now
