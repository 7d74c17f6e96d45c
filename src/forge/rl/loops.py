"""The loops: one rollout function and one learning function, composed into a schedule."""

import asyncio
from collections.abc import Awaitable, Callable

Rollout = Callable[[], Awaitable[None]]
"""One rollout: from a prompt to episodes in the replay buffer."""

Learn = Callable[[int], Awaitable[None]]
"""One learning step, given its number (1 for the first): from a batch to new weights in the generator."""


async def async_rl_loop(rollout: Rollout, learn: Learn, *, steps: int, rollout_threads: int = 1) -> None:
    """Runs `rollout_threads` rollouts at any time, beside `steps` learning steps, one after the other.

    The first exception, of a rollout or of a step, ends the loop and is raised here. How far rollouts may
    run ahead of the trainer is up to the replay buffer (`ReplayBuffer.admit`).
    """

    async def roll() -> None:
        while True:
            await rollout()

    async def learn_all() -> None:
        for step in range(1, steps + 1):
            await learn(step)

    learner = asyncio.create_task(learn_all(), name="learn")
    tasks = [learner, *(asyncio.create_task(roll(), name=f"rollout {i}") for i in range(rollout_threads))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
