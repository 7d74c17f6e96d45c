"""Actors and services on real Monarch processes."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from forge.controller import Runtime
from forge.controller.provisioner import is_running
from forge.errors import ActorFailure, ConfigError, FanoutError, ForgeError, NotEnoughGPUs
from tests.integration.machines import Counter, Driver


def in_runtime(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with Runtime():
            await scenario()

    asyncio.run(main())


def test_an_actor_keeps_state_and_reports_its_ranks() -> None:
    async def scenario() -> None:
        actor = await Counter.options(procs=2).as_actor(start=5)
        assert [value for _, value in (await actor.add.call(2)).items()] == [7, 7]
        places = [place for _, place in (await actor.where.call()).items()]
        assert [(rank, size) for rank, size, _ in places] == [(0, 2), (1, 2)]
        assert places[0][2] != places[1][2] != os.getpid()
        assert await actor.add.route(1) == 8
        assert await actor.add.fanout(1) == [9]
        with pytest.raises(ForgeError, match="2 processes: use .add.call"):
            await actor.add.call_one(1)
        with pytest.raises(AttributeError, match="no endpoint 'subtract'.*add"):
            actor.subtract  # noqa: B018
        [env] = {v for _, v in (await actor.environment.call("OMP_WAIT_POLICY")).items()}
        assert env == "PASSIVE"

    in_runtime(scenario)


def test_calls_to_one_replica_overlap_and_spread_over_the_least_loaded() -> None:
    async def scenario() -> None:
        service = await Counter.options(num_replicas=2).as_service()
        started = time.perf_counter()
        pids = await asyncio.gather(*(service.wait.route(0.5) for _ in range(10)))
        assert time.perf_counter() - started < 2.5  # one after the other they would take 5 s, halved 2.5 s
        assert sorted(pids.count(pid) for pid in set(pids)) == [5, 5]
        slow = asyncio.ensure_future(service.wait.route(1.0))
        await asyncio.sleep(0.1)
        free = {await service.wait.route(0) for _ in range(4)}
        assert len(free) == 1 and await slow not in free

    in_runtime(scenario)


def test_a_session_stays_on_one_replica_of_its_own_service_only() -> None:
    async def scenario() -> None:
        a = await Counter.options(num_replicas=3).as_service()
        b = await Counter.options(num_replicas=2).as_service()
        async with a.session():
            assert len({await a.wait.route(0) for _ in range(6)}) == 1
            assert len({await b.wait.route(0) for _ in range(6)}) == 2

        async def one_session() -> int:
            async with a.session():
                pids = {await a.wait.route(0.05) for _ in range(3)}
            assert len(pids) == 1
            return pids.pop()

        assert len(set(await asyncio.gather(*(one_session() for _ in range(3))))) == 3
        assert len({await a.wait.route(0) for _ in range(6)}) == 3

    in_runtime(scenario)


def test_what_an_endpoint_raises_is_raised_at_the_caller_and_the_replica_lives() -> None:
    async def scenario() -> None:
        service = await Counter.as_service()
        actor = await Counter.as_actor()
        for verb in (service.fail.route, service.fail.fanout, actor.fail.call_one, actor.fail.call):
            with pytest.raises(ValueError, match="no such thing") as raised:
                await asyncio.wait_for(verb("value"), 20)
            assert any("machines.py" in note for note in raised.value.__notes__)
        with pytest.raises(ActorFailure, match="Unpicklable: holds a lock"):
            await asyncio.wait_for(service.fail.route("unpicklable"), 20)
        assert await service.add.route() == 1

    in_runtime(scenario)


def test_fanout_reaches_all_and_names_every_replica_that_failed() -> None:
    async def scenario() -> None:
        service = await Counter.options(num_replicas=3).as_service()
        assert await service.add.fanout(1) == [1, 1, 1]
        async with service.session():
            await service.add.route(10)
        with pytest.raises(
            FanoutError, match=r"1 of 3 replicas failed: replica \d: ValueError: 11 is over 5"
        ) as raised:
            await service.fail_above.fanout(5)
        assert sorted(raised.value.results.values()) == [1, 1]

    in_runtime(scenario)


def test_monarch_verbs_on_a_service_name_the_verb_to_use() -> None:
    async def scenario() -> None:
        service = await Counter.as_service()
        for verb in ("call", "call_one", "choose", "broadcast"):
            with pytest.raises(ForgeError, match="use .add.route .*fanout"):
                getattr(service.add, verb)(1)

    in_runtime(scenario)


def test_a_failing_constructor_or_setup_is_raised_at_the_start_and_leaves_nothing() -> None:
    async def scenario() -> None:
        before = children()
        for start, words in ((-1, "start must not be negative, got -1"), (13, "13 brings bad luck")):
            with pytest.raises(ForgeError, match=words):
                await Counter.options(num_replicas=2).as_service(start=start)
        await until(lambda: children() == before)

    in_runtime(scenario)


def test_a_call_lost_with_its_replica_is_repeated_on_another_and_the_replica_comes_back() -> None:
    async def scenario() -> None:
        service = await Counter.options(num_replicas=2).as_service()
        victim = await service.wait.route(0)
        calls = [asyncio.ensure_future(service.wait.route(2)) for _ in range(4)]
        await asyncio.sleep(0.3)
        os.kill(victim, signal.SIGKILL)
        answers = await asyncio.wait_for(asyncio.gather(*calls), 30)
        assert len(answers) == 4 and victim not in answers
        await healed(service)
        states = await service.replicas()
        assert sorted(r.restarts for r in states) == [0, 1]
        assert "sig=9" in next(r.reason for r in states if r.reason)
        pids = {await service.wait.route(0) for _ in range(4)}
        assert len(pids) == 2 and victim not in pids

    in_runtime(scenario)


def test_handles_travel_to_other_actors_and_rank_0_may_drive_its_peers() -> None:
    async def scenario() -> None:
        a, b = await asyncio.gather(Counter.as_actor(), Counter.as_actor(100))
        assert await a.add_at.call_one(b, 11) == 111
        driver = await Driver.options(procs=2).as_service()
        assert await driver.ranks.route() == [0, 1]

    in_runtime(scenario)


def test_metrics_are_collected_from_all_processes() -> None:
    async def scenario() -> None:
        service = await Counter.options(num_replicas=2).as_service()
        await service.add.fanout(3)
        assert (await Runtime.current().drain_metrics())["counter/num_added"] == 6
        assert "counter/num_added" not in await Runtime.current().drain_metrics()

    in_runtime(scenario)


def test_a_failed_broadcast_is_raised_by_the_next_call() -> None:
    async def scenario() -> None:
        actor = await Counter.as_actor()
        actor.fail.broadcast("value")
        await asyncio.sleep(0.5)
        with pytest.raises(ActorFailure, match="earlier broadcast"):
            await actor.add.call_one()
        assert await actor.add.call_one() == 1

    in_runtime(scenario)


def test_impossible_options_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    async def scenario() -> None:
        before = children()
        with pytest.raises(NotEnoughGPUs, match="counter wants 3 GPUs for replica 1 of 2, 0 of 0"):
            await Counter.options(procs=3, num_replicas=2, with_gpus=True).as_service()
        with pytest.raises(ConfigError, match="num_replicas=2 needs as_service"):
            await Counter.options(num_replicas=2).as_actor()
        with pytest.raises(ConfigError, match="procs must be at least 1, got 0"):
            Counter.options(procs=0)
        assert children() == before

    in_runtime(scenario)


def test_the_runtime_stops_every_process_also_when_the_block_raises() -> None:
    seen: list[int] = []

    async def scenario() -> None:
        service = await Counter.options(num_replicas=2).as_service()
        seen.extend(await service.wait.fanout(0))
        hanging = asyncio.ensure_future(service.wait.route(100))
        await asyncio.sleep(0.2)
        assert all(is_running(pid) for pid in seen) and not hanging.done()
        raise KeyError("the user's own")

    started = time.perf_counter()
    with pytest.raises(KeyError):
        in_runtime(scenario)
    assert len(seen) == 2 and not any(is_running(pid) for pid in seen)
    assert time.perf_counter() - started < 25


def test_a_service_can_be_shut_down_alone() -> None:
    async def scenario() -> None:
        a, b = await Counter.as_service(), await Counter.as_service()
        [pid] = await a.wait.fanout(0)
        await a.shutdown()
        assert not is_running(pid)
        assert await b.add.route() == 1

    in_runtime(scenario)


async def healed(service: Any, seconds: float = 60.0) -> None:
    """Waits until every replica takes calls."""
    deadline = time.perf_counter() + seconds
    while any(r.state.value != "healthy" for r in await service.replicas()):
        assert time.perf_counter() < deadline, await service.replicas()
        await asyncio.sleep(0.1)


def children() -> set[int]:
    """Pids of this process's children, whichever of its threads started them."""
    lists = [tasks.read_text() for tasks in Path(f"/proc/{os.getpid()}/task").glob("*/children")]
    return {int(pid) for pids in lists for pid in pids.split() if is_running(int(pid))}


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < deadline, "it did not happen in time"
        await asyncio.sleep(0.05)
