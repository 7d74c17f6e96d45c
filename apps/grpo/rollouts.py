"""Rollouts alone: what the model as it is makes of the questions, measured and recorded; no trainer."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, stdev

from apps.grpo.config import GRPOConfig
from apps.grpo.loop_config import BufferConfig
from apps.grpo.machines import Machines, start
from forge.app import Run
from forge.data_models import Episode
from forge.observability import record
from forge.rl.advantage import has_variance
from forge.rl.loops import async_rl_loop
from forge.rl.record import FOLDER, read, write

Rollout = Callable[[Machines, GRPOConfig], Awaitable[None]]


async def rollouts_only(config: GRPOConfig, run: Run, rollout: Rollout) -> None:
    """`steps` batches of groups by the same rollout that training uses, each recorded as one step of
    RUN/episodes, for a later replay; and a row of metrics each: reward, lengths, tokens per second.

    All are of the one policy there is, so that nothing is ever too old, and rollouts never wait. As many
    begin as are recorded: were there more, fast ones would take the places of slow ones in the last batch.
    """
    config = without_trainer(config)
    m = await start(config, run.folder, without={"trainer"})
    run.started()
    begun = time.perf_counter()
    await async_rl_loop(
        limited(partial(rollout, m, config), config.steps * config.training.batch_size),
        partial(keep, m, run),
        steps=config.steps,
        rollout_threads=config.rollout_threads,
    )
    episodes = [episode for step in read(run.folder) for episode in step.episodes]
    print(told(episodes, time.perf_counter() - begun), flush=True)


def limited(rollout: Callable[[], Awaitable[None]], num_rollouts: int) -> Callable[[], Awaitable[None]]:
    """The first so many calls of it; any further one waits until it is cancelled."""
    turns = iter(range(num_rollouts))

    async def roll() -> None:
        if next(turns, None) is None:
            await asyncio.Event().wait()
        await rollout()

    return roll


def without_trainer(config: GRPOConfig) -> GRPOConfig:
    """The same with the trainer's GPUs left to others, and a buffer that lets all rollouts in at once.

    Dynamic sampling is off: it would measure the questions that it selects.
    """
    trainer = replace(config.services.trainer, with_gpus=False)
    return replace(
        config,
        max_policy_age=config.steps,
        training=replace(config.training, sync_interval=1),
        buffer=BufferConfig(),
        grpo=replace(config.grpo, dynamic_sampling=False),
        services=replace(config.services, trainer=trainer),
        colocate=False,
    )


async def keep(m: Machines, run: Run, step: int) -> None:
    """The next batch, to the disk and as numbers."""
    await m.buffer.sample.call_one(curr_policy_version=0, wait=True)
    episodes = await m.buffer.sampled.call_one()
    await asyncio.to_thread(write, run.folder / FOLDER, step, episodes, version=0)
    measure(episodes)
    await run.report(step)


def measure(episodes: Sequence[Episode]) -> None:
    """What a batch comes to."""
    lengths = [len(e.completion.token_ids) for e in episodes]
    groups = rewards_of_groups(episodes)
    record(
        "rollouts",
        reward=fmean(e.reward for e in episodes),
        length=fmean(lengths),
        length_max=max(lengths),
        length_min=min(lengths),
        cut_off=fmean(e.completion.stop_reason == "length" for e in episodes),
        best_of_group=fmean(max(rewards) for rewards in groups),
        without_variance=fmean(not has_variance(rewards) for rewards in groups),
        num_episodes=len(episodes),
    )


def told(episodes: Sequence[Episode], seconds: float) -> str:
    """All of them in a sentence; the error of the mean reward is that over questions."""
    means = [fmean(rewards) for rewards in rewards_of_groups(episodes)]
    error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("nan")
    num_tokens = sum(len(e.completion.token_ids) for e in episodes)
    cut_off = fmean(e.completion.stop_reason == "length" for e in episodes)
    return (
        f"{len(episodes)} answers to {len(means)} questions: reward {fmean(means):.4f} +- {error:.4f}, "
        f"{num_tokens / len(episodes):.1f} tokens each, {cut_off:.1%} cut off, {num_tokens / seconds:.0f} "
        "tokens/s"
    )


def rewards_of_groups(episodes: Sequence[Episode]) -> list[list[float]]:
    """Those of each question's answers."""
    groups: dict[str, list[float]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, []).append(episode.reward)
    return list(groups.values())
