"""async_rl_loop: what runs beside what, and how it ends."""

import asyncio

import pytest

from forge.rl.loops import async_rl_loop


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
