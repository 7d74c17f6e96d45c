"""Continuous batching over an engine that fails and stalls on request."""

import asyncio
import threading
from asyncio import CancelledError
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from forge.actors._vllm.engine_loop import EngineLoop
from forge.controller import ForgeActor
from forge.controller.call import ledger
from forge.errors import ActorFailure, ForgeError, ReplicaUnfit

SAMPLING = cast(Any, None)


@dataclass(frozen=True)
class Output:
    request_id: str
    num_steps: int


class FakeEngine:
    """Finishes a request after as many steps as its prompt has tokens; prompts of [0] are refused."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.num_steps = 0
        self.log: list[str] = []
        self.breaks_at: int | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self.left)

    def add(self, request_id: str, prompt_ids: list[int], sampling: object) -> None:
        if prompt_ids == [0]:
            raise ForgeError("refused")
        self.left[request_id] = len(prompt_ids)
        self.log.append(f"add {request_id}")

    def step(self) -> list[Output]:
        if not self.left:
            return []
        self.num_steps += 1
        if self.num_steps == self.breaks_at:
            raise RuntimeError("out of memory")
        self.left = {request_id: left - 1 for request_id, left in self.left.items()}
        finished = [request_id for request_id, left in self.left.items() if left == 0]
        self.left = {request_id: left for request_id, left in self.left.items() if left}
        return [Output(request_id, self.num_steps) for request_id in finished]

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.left[request_id]
            self.log.append(f"abort {request_id}")

    def sleep(self) -> None:
        self.log.append(f"sleep after {self.num_steps}")

    def wake(self) -> None:
        self.log.append(f"wake after {self.num_steps}")

    def note(self, text: str) -> Callable[[], None]:
        return lambda: self.log.append(f"{text} after {self.num_steps}")


def loop_of(engine: FakeEngine) -> EngineLoop:
    return EngineLoop(cast(Any, engine), ForgeActor().run_blocking)


def test_overlapping_calls_share_steps() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        loop = loop_of(engine)
        outputs = await asyncio.gather(*(loop.generate([1] * length, SAMPLING) for length in (5, 3, 7, 5)))
        assert engine.num_steps == 7
        assert [cast(Any, o).num_steps for o in outputs] == [5, 3, 7, 5]
        await loop.generate([1, 1], SAMPLING)
        assert engine.num_steps == 9, "it starts again after it was idle"

    asyncio.run(scenario())


def test_a_change_is_made_between_two_steps_of_running_requests() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        loop = loop_of(engine)
        running = asyncio.create_task(cast(Any, loop.generate([1] * 10_000, SAMPLING)))
        await asyncio.sleep(0.05)
        await loop.between_steps(engine.note("change"))
        assert not running.done()
        await running
        [_, change] = engine.log
        assert 0 < int(change.split()[-1]) < 10_000

    asyncio.run(scenario())


def test_a_refused_request_concerns_only_its_caller() -> None:
    async def scenario() -> None:
        loop = loop_of(FakeEngine())
        good, bad = await asyncio.gather(
            loop.generate([1] * 4, SAMPLING), loop.generate([0], SAMPLING), return_exceptions=True
        )
        assert cast(Any, good).num_steps == 4
        assert isinstance(bad, ForgeError) and str(bad) == "refused"

    asyncio.run(scenario())


def test_after_a_change_that_fails_no_step_is_made_until_it_is_resumed() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        loop = loop_of(engine)
        num_steps: list[int] = []

        def fail() -> None:
            num_steps.append(engine.num_steps)
            raise ForgeError("half of version 7")

        running = asyncio.create_task(cast(Any, loop.generate([1] * 10_000_000, SAMPLING)))
        await asyncio.sleep(0.02)
        change = asyncio.create_task(loop.between_steps(fail))
        behind = asyncio.create_task(cast(Any, loop.generate([1], SAMPLING)))
        repair = asyncio.create_task(loop.between_steps(engine.note("repair")))
        with pytest.raises(ForgeError, match="half of version 7"):
            await change
        for call in (running, behind, loop.generate([1], SAMPLING)):
            with pytest.raises(ReplicaUnfit, match="half of version 7"):
                await asyncio.wait_for(call, 1)
        await repair
        assert engine.log == ["add 0", "abort 0", f"repair after {num_steps[0]}"]
        loop.resume()
        await loop.generate([1], SAMPLING)
        assert [engine.num_steps] == [num_steps[0] + 1] and num_steps[0] > 0

    asyncio.run(scenario())


def test_a_broken_engine_fails_every_caller_and_all_later_ones() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.breaks_at = 3
        loop = loop_of(engine)
        calls = [asyncio.create_task(cast(Any, loop.generate([1] * 50, SAMPLING))) for _ in range(3)]
        outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
        assert [type(o) for o in outcomes] == [ActorFailure] * 3
        assert "RuntimeError: out of memory" in str(outcomes[0])
        with pytest.raises(ActorFailure, match="out of memory"):
            await loop.generate([1], SAMPLING)
        with pytest.raises(ActorFailure, match="out of memory"):
            await loop.between_steps(engine.note("late"))
        assert engine.num_steps == 3 and len(engine.log) == 3

    asyncio.run(scenario())


def test_a_failure_from_outside_reaches_callers_while_a_step_hangs() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        loop = loop_of(engine)
        release = asyncio.Event()
        event_loop = asyncio.get_running_loop()

        def hang() -> None:
            asyncio.run_coroutine_threadsafe(cast(Any, release.wait()), event_loop).result(5)

        stuck = asyncio.create_task(loop.between_steps(hang))
        waiting = asyncio.create_task(cast(Any, loop.generate([1], SAMPLING)))
        await asyncio.sleep(0.05)
        loop.fail("rank 1 is gone")
        for call in (stuck, waiting):
            with pytest.raises(ActorFailure, match="rank 1 is gone"):
                await asyncio.wait_for(call, 1)
        release.set()

    asyncio.run(scenario())


def test_what_a_cancelled_caller_wanted_is_given_up_and_the_others_go_on() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        loop = loop_of(engine)
        impatient = asyncio.create_task(cast(Any, loop.generate([1] * 10_000_000, SAMPLING)))
        patient = asyncio.create_task(cast(Any, loop.generate([1] * 20_000, SAMPLING)))
        await asyncio.sleep(0.02)
        impatient.cancel()
        assert (await patient).num_steps == 20_000, "no step is lost"
        assert engine.log == ["add 0", "add 1", "abort 0"]
        assert not engine.is_busy
        await asyncio.sleep(0.02)
        assert engine.num_steps == 20_000, "nothing is left to do"

    asyncio.run(scenario())


def test_a_call_that_is_cancelled_before_it_began_never_begins() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        loop = loop_of(engine)
        release = threading.Event()
        stuck = asyncio.create_task(loop.between_steps(lambda: cast(None, release.wait(5))))
        await asyncio.sleep(0.02)
        calls = [
            asyncio.create_task(cast(Any, loop.generate([1], SAMPLING))),
            asyncio.create_task(loop.between_steps(engine.note("change"))),
        ]
        await asyncio.sleep(0.02)
        for call in calls:
            call.cancel()
        release.set()
        await stuck
        assert [type(o) for o in await asyncio.gather(*calls, return_exceptions=True)] == [CancelledError] * 2
        await loop.between_steps(engine.note("next"))
        assert engine.log == ["next after 0"]

    asyncio.run(scenario())


def test_every_step_is_progress_that_a_watcher_sees() -> None:
    async def scenario() -> None:
        before = ledger.num_moves
        await loop_of(FakeEngine()).generate([1] * 50, SAMPLING)
        assert ledger.num_moves - before >= 50

    asyncio.run(scenario())


def test_a_change_that_wants_an_idle_engine_lets_running_requests_end_and_holds_back_new_ones() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        loop = loop_of(engine)
        running = [asyncio.create_task(cast(Any, loop.generate([1] * n, SAMPLING))) for n in (9_000, 20_000)]
        endless = asyncio.create_task(cast(Any, loop.generate([1] * 10_000_000, SAMPLING)))
        await asyncio.sleep(0.02)
        change = asyncio.create_task(loop.between_steps(engine.note("change"), when_idle=True))
        await asyncio.sleep(0)
        late = asyncio.create_task(cast(Any, loop.generate([1] * 3, SAMPLING)))
        assert (await running[0]).num_steps == 9_000
        assert not change.done() and "add 3" not in engine.log
        endless.cancel()
        await change
        assert (await late).num_steps == 20_003 and running[1].done()
        assert engine.log[-2:] == ["change after 20000", "add 3"]

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_while_it_is_suspended_nothing_is_sampled_but_changes_are_made() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        loop = loop_of(engine)
        running = asyncio.create_task(cast(Any, loop.generate([1] * 10_000_000, SAMPLING)))
        await asyncio.sleep(0.02)
        loop.suspend("no proven weights")
        for call in (running, loop.generate([1], SAMPLING)):
            with pytest.raises(ReplicaUnfit, match="no proven weights"):
                await asyncio.wait_for(call, 1)
        await loop.between_steps(engine.note("change"))
        assert not engine.is_busy and engine.log[1] == "abort 0"
        loop.resume()
        assert (await loop.generate([1], SAMPLING)) is not None

    asyncio.run(scenario())


def test_one_at_a_time_a_request_begins_when_the_one_before_has_ended_and_changes_do_not_wait() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        loop = EngineLoop(cast(Any, engine), ForgeActor().run_blocking, one_at_a_time=True)
        calls = [asyncio.create_task(cast(Any, loop.generate([1] * n, SAMPLING))) for n in (20_000, 9, 4)]
        await asyncio.sleep(0.02)
        calls[1].cancel()
        await loop.between_steps(engine.note("change"))
        assert not calls[0].done()
        assert [(await calls[i]).num_steps for i in (0, 2)] == [20_000, 20_004]
        assert [entry.split()[0] for entry in engine.log] == ["add", "change", "add"]

    asyncio.run(scenario())


def test_while_it_is_asleep_calls_wait_and_changes_are_made() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        loop = loop_of(engine)
        running = asyncio.create_task(cast(Any, loop.generate([1] * 20_000, SAMPLING)))
        await asyncio.sleep(0.02)
        await asyncio.gather(loop.sleep(), loop.sleep())
        slept_at = engine.num_steps
        late, given_up = (asyncio.create_task(cast(Any, loop.generate([1] * 3, SAMPLING))) for _ in range(2))
        await loop.between_steps(engine.note("change"))
        given_up.cancel()
        await asyncio.sleep(0.05)
        assert 0 < slept_at == engine.num_steps < 20_000 and not late.done()
        assert engine.log[1:] == [f"sleep after {slept_at}", f"change after {slept_at}"]
        await asyncio.gather(loop.wake(), loop.wake())
        assert (await running).num_steps == 20_000 and (await late).num_steps == slept_at + 4
        assert [entry.split()[0] for entry in engine.log[3:]] == ["wake", "add"]

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_sleep_that_wants_an_idle_engine_lets_requests_end_and_the_next_ones_wait() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        loop = loop_of(engine)
        running = asyncio.create_task(cast(Any, loop.generate([1] * 9_000, SAMPLING)))
        await asyncio.sleep(0.01)
        sleep = asyncio.create_task(loop.sleep(when_idle=True))
        await asyncio.sleep(0)
        late = asyncio.create_task(cast(Any, loop.generate([1], SAMPLING)))
        await sleep
        assert (await running).num_steps == 9_000 == engine.num_steps
        await loop.between_steps(engine.note("update"), when_idle=True)
        assert not late.done()
        await loop.wake()
        assert (await late).num_steps == 9_001

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_failure_reaches_those_who_wait_for_it_to_wake() -> None:
    async def scenario() -> None:
        loop = loop_of(FakeEngine())
        await loop.sleep()
        waiting = asyncio.create_task(cast(Any, loop.generate([1], SAMPLING)))
        await asyncio.sleep(0.01)
        loop.fail("the generator was stopped")
        with pytest.raises(ActorFailure, match="was stopped"):
            await asyncio.wait_for(waiting, 1)

    asyncio.run(scenario())
