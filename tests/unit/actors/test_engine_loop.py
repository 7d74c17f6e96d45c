"""Continuous batching over an engine that fails and stalls on request."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from forge.actors._vllm.engine_loop import EngineLoop
from forge.controller import ForgeActor
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


def test_a_caller_who_gives_up_does_not_disturb_the_others() -> None:
    async def scenario() -> None:
        loop = loop_of(FakeEngine())
        impatient = asyncio.create_task(cast(Any, loop.generate([1] * 20_000, SAMPLING)))
        patient = asyncio.create_task(cast(Any, loop.generate([1] * 20_000, SAMPLING)))
        await asyncio.sleep(0.02)
        impatient.cancel()
        assert (await patient).num_steps > 0

    asyncio.run(scenario())
