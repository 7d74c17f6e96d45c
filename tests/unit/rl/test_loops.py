"""The loops: what runs beside what, in which order, and how it ends."""

import asyncio
import os
import signal

import pytest

from forge.grace import StopRequest
from forge.rl.loops import async_rl_loop, synchronous_rl


def test_steps_run_in_order_beside_so_many_rollouts() -> None:
    steps: list[int] = []
    running = peak = 0

    async def rollout() -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.001)
        running -= 1

    async def learn(step: int) -> None:
        await asyncio.sleep(0.005)
        steps.append(step)

    asyncio.run(async_rl_loop(rollout, learn, steps=4, rollout_threads=3))
    assert steps == [1, 2, 3, 4] and peak == 3


@pytest.mark.parametrize("broken", ["rollout", "learn"])
def test_the_first_error_ends_the_loop_and_everything_in_it(broken: str) -> None:
    cancelled = 0

    async def work(name: str) -> None:
        nonlocal cancelled
        if name == broken:
            await asyncio.sleep(0.01)
            raise ValueError(f"{name} broke")
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled += 1
            raise

    async def main() -> None:
        await async_rl_loop(lambda: work("rollout"), lambda step: work("learn"), steps=1, rollout_threads=2)

    with pytest.raises(ValueError, match=f"{broken} broke"):
        asyncio.run(asyncio.wait_for(main(), 5))
    assert cancelled >= 1


def test_in_lockstep_no_rollout_runs_while_it_learns_and_none_is_missing() -> None:
    log: list[str] = []
    running = peak = 0

    async def rollout() -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.001 * (len(log) % 3))
        running -= 1
        log.append("rollout")

    async def learn(step: int) -> None:
        assert running == 0
        log.append(f"learn {step}")
        await asyncio.sleep(0.002)

    sizes = {"rollouts_per_step": 5, "rollout_threads": 2}
    asyncio.run(synchronous_rl(rollout, learn, steps=5, first=3, waiting=2, **sizes))
    assert log == [*["rollout"] * 3, "learn 3", *["rollout"] * 5, "learn 4", *["rollout"] * 5, "learn 5"]
    assert peak == 2


def test_in_lockstep_the_first_error_ends_it_and_cancels_the_other_rollouts() -> None:
    cancelled: list[int] = []

    async def rollout() -> None:
        number = numbers.pop()
        if number == 1:
            raise ValueError("rollout broke")
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    async def learn(step: int) -> None:
        raise AssertionError("nothing to learn from")

    numbers = [0, 1, 2]
    with pytest.raises(ValueError, match="rollout broke"):
        asyncio.run(synchronous_rl(rollout, learn, steps=1, rollouts_per_step=3, rollout_threads=3))
    assert sorted(cancelled) == [0, 2]


@pytest.mark.parametrize("schedule", ["synchronous", "asynchronous"])
def test_a_step_that_says_so_is_the_last_and_nothing_is_left_running(schedule: str) -> None:
    steps: list[int] = []

    async def learn(step: int) -> bool | None:
        steps.append(step)
        await asyncio.sleep(0.002)
        return False if step == 4 else None

    async def main() -> None:
        async def rollout() -> None:
            await asyncio.sleep(0.001)

        if schedule == "synchronous":
            await synchronous_rl(rollout, learn, steps=9, rollouts_per_step=2, first=2)
        else:
            await async_rl_loop(rollout, learn, steps=9, rollout_threads=2, first=2)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert steps == [2, 3, 4]


@pytest.mark.parametrize("schedule", ["synchronous", "asynchronous"])
def test_a_step_that_fails_after_a_request_to_stop_ends_the_run_with_its_error(schedule: str) -> None:
    """Else what it has left half done would be saved as the step before."""

    async def rollout() -> None:
        await asyncio.sleep(0.001)

    async def main() -> None:
        with StopRequest() as stop:

            async def learn(step: int) -> None:
                with stop.held():
                    os.kill(os.getpid(), signal.SIGTERM)
                    await asyncio.sleep(0.02)
                    raise ValueError("learn broke")

            if schedule == "synchronous":
                await stop.unless_asked(synchronous_rl(rollout, learn, steps=3, rollouts_per_step=1))
            else:
                await stop.unless_asked(async_rl_loop(rollout, learn, steps=3))

    with pytest.raises(ValueError, match="learn broke"):
        asyncio.run(asyncio.wait_for(main(), 5))
