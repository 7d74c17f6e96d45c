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
from forge.errors import ActorFailure, ForgeError

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


def test_a_refused_request_or_change_concerns_only_its_caller() -> None:
    def refuse() -> None:
        raise ForgeError("not that version")

    async def scenario() -> None:
        loop = loop_of(FakeEngine())
        good, bad, change = await asyncio.gather(
            loop.generate([1] * 4, SAMPLING),
            loop.generate([0], SAMPLING),
            loop.between_steps(refuse),
            return_exceptions=True,
        )
        assert cast(Any, good).num_steps == 4
        assert isinstance(bad, ForgeError) and str(bad) == "refused"
        assert isinstance(change, ForgeError) and str(change) == "not that version"

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
