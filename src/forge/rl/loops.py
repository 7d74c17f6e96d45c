"""The schedules: one rollout function and one learning function, composed into a loop.

`synchronous_rl` is on-policy: generate, train, update, in lockstep. `async_rl_loop` does it all side by side;
how far rollouts may run ahead of the trainer is up to the replay buffer (`ReplayBuffer.admit`): one step for
one-step-off, k steps, or as far as it serves (`forge.rl.staleness`). See docs/asynchrony.md.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any

Rollout = Callable[[], Awaitable[None]]
"""One rollout: from a prompt to episodes in the replay buffer."""

Learn = Callable[[int], Awaitable[bool | None]]
"""One learning step, given its number (1 for a run's first): from a batch to new weights in the generator.
False ends the loop with this step; anything else, also no value at all, goes on."""


async def synchronous_rl(
    rollout: Rollout,
    learn: Learn,
    *,
    steps: int,
    rollouts_per_step: int,
    rollout_threads: int = 1,
    first: int = 1,
    waiting: int = 0,
) -> None:
    """In each of the steps `first` to `steps`: so many rollouts, `rollout_threads` of them at a time; then
    `learn`.

    Nothing else is under way while it learns. Every batch is of the newest policy where `learn` returns once
    the generators have the new weights, or rollouts wait for these, as `ReplayBuffer.admit` does. The first
    exception, of a rollout or of a step, ends the loop and is raised here.

    waiting: rollouts of the first step whose episodes wait already, where a run goes on that was stopped
    between them.
    """

    async def roll(turns: Iterator[int]) -> None:
        for _ in turns:
            await rollout()

    for step in range(first, steps + 1):
        turns = iter(range(rollouts_per_step - (waiting if step == first else 0)))
        rolls = {f"rollout {i}": roll(turns) for i in range(rollout_threads)}
        await _watch(rolls, until=asyncio.FIRST_EXCEPTION)
        if await learn(step) is False:
            return


async def async_rl_loop(
    rollout: Rollout, learn: Learn, *, steps: int, rollout_threads: int = 1, first: int = 1
) -> None:
    """Runs `rollout_threads` rollouts at any time, beside the learning steps `first` to `steps`, one after
    the other.

    The first exception, of a rollout or of a step, ends the loop and is raised here. Rollouts still under
    way after the last step are cancelled.
    """

    async def roll() -> None:
        while True:
            await rollout()

    async def learn_all() -> None:
        for step in range(first, steps + 1):
            if await learn(step) is False:
                return

    rolls = {f"rollout {i}": roll() for i in range(rollout_threads)}
    await _watch({"learn": learn_all(), **rolls}, until=asyncio.FIRST_COMPLETED)


async def _watch(works: Mapping[str, Coroutine[Any, Any, None]], until: str) -> None:
    """Runs all of these, by name, until `until` (see asyncio.wait): none is left running, and the first error
    is raised, also where a cancellation comes with it."""
    tasks = [asyncio.create_task(work, name=name) for name, work in works.items()]
    try:
        await asyncio.wait(tasks, return_when=until)
    finally:
        ended = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in ended:
            task.result()
