"""The queue, the choice and the second attempt, without any process."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from forge.controller.call import Outgoing, ledger
from forge.controller.dispatcher import MAX_ATTEMPTS, Dispatcher, Roster
from forge.controller.lane import Lane, LaneLost, Member
from forge.controller.router import LeastLoadedRouter
from forge.controller.session import open_session
from forge.errors import ActorFailure, CallTimeout, ForgeError, ReplicaLost, ReplicaUnfit


def members(*indices: int, generation: int = 0) -> tuple[Member, ...]:
    return tuple(Member(i, generation, hosts=None, num_procs=1, pid=1000 + i) for i in indices)


def make(num: int, *, limit: int | None = None, down_timeout_s: float = 0.2) -> tuple[Dispatcher, list]:
    lost: list[tuple[int, str]] = []
    dispatcher = Dispatcher(
        "svc",
        LeastLoadedRouter(),
        max_concurrent=limit,
        down_timeout_s=down_timeout_s,
        report_lost=lambda member, reason: lost.append((member.index, reason)),
    )
    dispatcher.update(Roster(1, members(*range(num))))
    return dispatcher, lost


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


async def where(lane: Lane, call: Outgoing) -> int:
    await asyncio.sleep(0.001)
    return lane.index


def test_equals_take_turns_and_the_least_loaded_comes_first() -> None:
    async def scenario() -> None:
        dispatcher, _ = make(3)
        assert [await dispatcher.run("m", where) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
        counts = Counter(await asyncio.gather(*(dispatcher.run("m", where) for _ in range(30))))
        assert counts == {0: 10, 1: 10, 2: 10}

    run(scenario)


def test_a_user_may_bring_another_router() -> None:
    class Last:
        def choose(self, replicas: Any) -> int:
            return len(replicas) - 1

    async def scenario() -> None:
        dispatcher = Dispatcher(
            "svc", Last(), max_concurrent=None, down_timeout_s=1, report_lost=lambda member, reason: None
        )
        dispatcher.update(Roster(1, members(0, 1, 2)))
        assert {await dispatcher.run("m", where) for _ in range(5)} == {2}

    run(scenario)


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_keeps_the_limit_the_order_and_every_call(seed: int) -> None:
    """Calls of random length, some given up, while replicas are lost and come back: against a plain count."""

    async def scenario() -> None:
        dice = random.Random(seed)
        limit, num = dice.randint(1, 3), dice.randint(1, 4)
        dispatcher, _ = make(num, limit=limit, down_timeout_s=10)
        running: Counter[int] = Counter()
        begun: list[int] = []
        generation = Counter[int]()

        def come_back(index: int) -> None:
            generation[index] += 1
            there = {lane.index: lane.member for lane in dispatcher.lanes}
            there[index] = members(index, generation=generation[index])[0]
            dispatcher.update(Roster(dispatcher.roster.epoch + 1, tuple(there.values()), num_coming=1))

        async def work(lane: Lane, call: Outgoing) -> str:
            running[id(lane)] += 1
            assert running[id(lane)] <= limit
            try:
                await asyncio.sleep(dice.random() * 0.004)
                if dice.random() < 0.1 and lane.is_open:
                    asyncio.get_running_loop().call_later(0.005, come_back, lane.index)
                    raise LaneLost("killed")
                return "done"
            finally:
                running[id(lane)] -= 1

        async def one(number: int) -> str:
            async def noted(lane: Lane, call: Outgoing) -> str:
                if call.attempt == 1:
                    begun.append(number)
                return await work(lane, call)

            return await dispatcher.run("m", noted, retry=True)

        tasks = [asyncio.create_task(one(i)) for i in range(60)]
        given_up = {i for i in range(60) if dice.random() < 0.15}
        await asyncio.sleep(0.002)
        for i in given_up:
            tasks[i].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, ReplicaLost):  # very unlucky, but then it says so
                assert "may be what kills them" in str(outcome)
            else:
                assert outcome == "done" or i in given_up, outcome
        assert begun == sorted(begun)
        await asyncio.sleep(0.01)
        assert dispatcher.num_waiting == 0 and all(lane.load == 0 for lane in dispatcher.lanes)
        assert not ledger.outgoing

    run(scenario)


def test_a_lost_call_is_repeated_elsewhere_under_the_same_id_or_raises() -> None:
    async def scenario() -> None:
        dispatcher, lost = make(3)
        ids = []

        async def dies_on_0_and_1(lane: Lane, call: Outgoing) -> int:
            ids.append(call.id)
            if lane.index < 2:
                raise LaneLost("sig=9")
            return lane.index

        assert await dispatcher.run("m", dies_on_0_and_1, retry=True) == 2
        assert len(ids) == 3 and len(set(ids)) == 1
        assert lost == [(0, "sig=9"), (1, "sig=9")]
        dispatcher.update(Roster(2, members(0, 1, generation=1)))
        with pytest.raises(ReplicaLost, match=r"svc\.m: the process of replica 0 is gone \(sig=9\)$"):
            await dispatcher.run("m", dies_on_0_and_1)

    run(scenario)


def test_an_unfit_replica_is_lost_where_it_is_replaced_and_its_calls_are_always_made_elsewhere() -> None:
    async def unfit_on_0(lane: Lane, call: Outgoing) -> int:
        if lane.index == 0:
            raise ReplicaUnfit("no proven weights\nraised in ...")
        return lane.index

    async def scenario() -> None:
        dispatcher, lost = make(2)
        assert await dispatcher.run("m", unfit_on_0, retry=False) == 1
        assert lost == [(0, "no proven weights")] and [lane.index for lane in dispatcher.lanes] == [1]
        dispatcher, lost = make(0)
        dispatcher.update(Roster(2, members(0), heals=False))
        with pytest.raises(ActorFailure, match="no proven weights") as caught:
            await dispatcher.run("m", unfit_on_0, retry=True)
        assert not isinstance(caught.value, ReplicaUnfit), "or an actor that called it would pass for unfit"
        assert not lost and dispatcher.lanes[0].is_open and dispatcher.lanes[0].load == 0

    run(scenario)


def test_a_call_is_given_up_after_many_replicas() -> None:
    async def scenario() -> None:
        dispatcher, lost = make(MAX_ATTEMPTS + 5)

        async def kills(lane: Lane, call: Outgoing) -> None:
            raise LaneLost("sig=11")

        with pytest.raises(ReplicaLost, match="may be what kills them"):
            await dispatcher.run("m", kills, retry=True)
        assert len(lost) == MAX_ATTEMPTS

    run(scenario)


def test_without_replicas_calls_wait_for_a_while_or_fail_at_once() -> None:
    async def scenario() -> None:
        dispatcher, _ = make(0)
        dispatcher.update(Roster(2, num_coming=1, reasons=("replica 0: out of memory",)))
        with pytest.raises(ActorFailure, match=r"none came back within 0\.2 s: replica 0: out of memory"):
            await dispatcher.run("m", where)
        waiting = asyncio.create_task(dispatcher.run("m", where))
        await asyncio.sleep(0.05)
        dispatcher.update(Roster(3, members(7)))
        assert await waiting == 7
        dispatcher.update(Roster(4, num_coming=0, reasons=("replica 7: gave up",)))
        with pytest.raises(ActorFailure, match="none is being replaced any more: replica 7: gave up"):
            await dispatcher.run("m", where)
        dispatcher.update(Roster(5, is_closed=True))
        with pytest.raises(ActorFailure, match="svc was shut down"):
            await dispatcher.run("m", where)

    run(scenario)


def test_one_who_lost_the_only_replica_waits_for_news_of_it() -> None:
    async def scenario() -> None:
        dispatcher, lost = make(1, down_timeout_s=5)

        async def dies_once(lane: Lane, call: Outgoing) -> int:
            if lane.member.generation == 0:
                raise LaneLost("sig=9")
            return lane.index

        waiting = asyncio.create_task(dispatcher.run("m", dies_once, retry=True))
        await asyncio.sleep(0.02)
        assert lost == [(0, "sig=9")] and not waiting.done()
        dispatcher.update(Roster(2, members(0, generation=1)))
        assert await waiting == 0

    run(scenario)


def test_a_router_that_fails_is_told_to_the_call_it_was_to_serve() -> None:
    class Broken:
        def choose(self, replicas: Any) -> int:
            raise KeyError("no such replica")

    async def scenario() -> None:
        dispatcher = Dispatcher(
            "svc", Broken(), max_concurrent=None, down_timeout_s=1, report_lost=lambda member, reason: None
        )
        dispatcher.update(Roster(1, num_coming=1))
        waiting = [asyncio.create_task(dispatcher.run("m", where)) for _ in range(3)]
        await asyncio.sleep(0)
        dispatcher.update(Roster(2, members(0)))
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, KeyError)

    run(scenario)


def test_a_second_event_loop_is_refused() -> None:
    dispatcher, _ = asyncio.run(_made())
    with pytest.raises(ForgeError, match="belongs to the event loop that used it first"):
        asyncio.run(dispatcher.run("m", where))


async def _made() -> tuple[Dispatcher, list]:
    dispatcher, lost = make(1)
    await dispatcher.run("m", where)
    return dispatcher, lost


def test_sessions_stick_nest_and_move_when_their_replica_is_gone() -> None:
    async def scenario() -> None:
        dispatcher, _ = make(3)
        with open_session("a") as outer:
            first = await dispatcher.run("m", where, session=outer)
            with open_session("a") as inner:
                second = await dispatcher.run("m", where, session=inner)
                assert second != first
                assert {await dispatcher.run("m", where, session=inner) for _ in range(4)} == {second}
            assert {await dispatcher.run("m", where, session=outer) for _ in range(4)} == {first}
            others = tuple(m for m in members(0, 1, 2) if m.index != first)
            dispatcher.update(Roster(2, others))
            moved = {await dispatcher.run("m", where, session=outer) for _ in range(4)}
            assert len(moved) == 1 and first not in moved

    run(scenario)


def test_one_who_waits_for_its_own_replica_holds_up_nobody() -> None:
    async def scenario() -> None:
        dispatcher, _ = make(2, limit=1)
        with open_session("a") as session:
            pinned = await dispatcher.run("m", where, session=session)
            release = asyncio.Event()

            async def hold(lane: Lane, call: Outgoing) -> int:
                await release.wait()
                return lane.index

            holder = asyncio.create_task(dispatcher.run("m", hold, session=session))
            await asyncio.sleep(0)
            behind = asyncio.create_task(dispatcher.run("m", where, session=session))
            await asyncio.sleep(0.01)
            assert await dispatcher.run("m", where) != pinned
            assert not behind.done()
            release.set()
            assert await holder == await behind == pinned

    run(scenario)


def test_an_endpoints_own_timeout_is_not_taken_for_the_deadline() -> None:
    async def scenario() -> None:
        dispatcher, _ = make(1)

        async def gives_up(lane: Lane, call: Outgoing) -> None:
            raise TimeoutError("the sandbox took too long")

        async def never(lane: Lane, call: Outgoing) -> None:
            await asyncio.sleep(60)

        with pytest.raises(TimeoutError, match="the sandbox") as raised:
            await dispatcher.run("m", gives_up, timeout_s=5)
        assert not isinstance(raised.value, CallTimeout)
        with pytest.raises(CallTimeout, match=r"svc\.m was not done within 0\.05 s: it was at replica 0"):
            await dispatcher.run("m", never, timeout_s=0.05)
        assert dispatcher.lanes[0].load == 0

    run(scenario)
