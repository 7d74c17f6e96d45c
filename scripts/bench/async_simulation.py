"""A job in virtual time: the real loops, replay buffer, weight synchronization and services, and machines
that sleep. What is simulated is only how long things take."""

import asyncio
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import virtual_time
from async_costs import Costs
from async_machines import Generator, Trainer, actor_of, service_of

from forge.actors.replay_buffer import BufferInfo, ReplayBuffer
from forge.data_models import Completion, Episode
from forge.observability import metrics
from forge.rl.loops import async_rl_loop, synchronous_rl
from forge.rl.staleness import AdaptiveAge
from forge.rl.weight_sync import WeightSync

AUTO_LIMIT = 16

THREADS_PER_PLACE = 3
"""Rollouts at a time for each group that fits into the generators. A group keeps its thread until its longest
answer has ended, when the places of the others have long been empty, so one for each is too few."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How rollouts and learning steps follow each other."""

    max_policy_age: int | Literal["auto"]
    steps: int
    synchronous: bool = False
    warmup: int = 0  # steps until it runs evenly, which are not counted

    @property
    def limit(self) -> int:
        """No episode is ever older than that."""
        return AUTO_LIMIT if self.max_policy_age == "auto" else self.max_policy_age


@dataclass(slots=True)
class Outcome:
    """What was seen of a job."""

    costs: Costs
    schedule: Schedule
    ends: list[float] = field(default_factory=list)  # of each step, in seconds from the start
    waits: list[float] = field(default_factory=list)  # of the learner for each batch
    ages: list[Counter[int]] = field(default_factory=list)  # episodes of each batch by the versions they lag
    bounds: list[int] = field(default_factory=list)  # for what is let in, after each step
    stocks: list[int] = field(default_factory=list)  # episodes left in the buffer by each batch
    info: BufferInfo | None = None

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, after the warm-up."""
        first = self.schedule.warmup
        began = self.ends[first - 1] if first else 0.0
        return (self.ends[-1] - began) / (len(self.ends) - first)

    @property
    def stock(self) -> tuple[float, float]:
        """Steps' worth left in the buffer after the warm-up and at the end. Where it shrinks, more was
        trained on meanwhile than made: with generators that have no time to spare, that can't go on."""
        first = self.schedule.warmup
        before = self.stocks[first - 1] if first else 0
        return before / self.costs.batch_size, self.stocks[-1] / self.costs.batch_size

    @property
    def throughput(self) -> float:
        """Episodes trained on per second, after the warm-up."""
        return self.costs.batch_size / self.step_s

    @property
    def efficiency(self) -> float:
        """Share of the ideal pipeline's throughput."""
        return self.throughput / self.costs.ideal

    @property
    def wait(self) -> float:
        """Share of its time that the learner waits, after the warm-up."""
        return statistics.mean(self.waits[self.schedule.warmup :]) / self.step_s

    @property
    def staleness(self) -> dict[int, float]:
        """Share of episodes by the versions they lag, after the warm-up."""
        counts = sum(self.ages[self.schedule.warmup :], Counter())
        return {age: counts[age] / counts.total() for age in sorted(counts)}

    @property
    def oldest(self) -> int:
        """Versions that any episode lagged, ever."""
        return max(age for counts in self.ages for age in counts)


def simulate(costs: Costs, schedule: Schedule, seed: int = 0) -> Outcome:
    """Runs a job from its start."""
    try:
        return virtual_time.run(_job(costs, schedule, seed))
    finally:
        metrics.drain()  # nobody reports them


async def _job(costs: Costs, schedule: Schedule, seed: int) -> Outcome:
    policy = service_of([Generator(costs, seed) for _ in range(costs.num_generators)], "generator")
    trainer = actor_of(Trainer(costs), "trainer")
    buffer = actor_of(
        ReplayBuffer(costs.batch_size // costs.num_ranks, schedule.limit, dp_size=costs.num_ranks), "buffer"
    )
    age = AdaptiveAge(schedule.limit) if schedule.max_policy_age == "auto" else None
    if age is not None:
        await buffer.bound.call_one(age.age)
    outcome, clock = Outcome(costs, schedule), asyncio.get_running_loop().time
    versions: dict[str, int] = {}  # of episodes that wait

    async def rollout() -> None:
        number = await buffer.admit.call_one(costs.group_size)
        completions = await policy.generate.route(number)
        episodes = [_episode(number, i, c) for i, c in enumerate(completions)]
        versions.update((e.episode_id, e.policy_version) for e in episodes)
        await buffer.add.call_one(*episodes)

    async def learn(step: int) -> None:
        began = clock()
        inputs, targets = await buffer.sample.call_one(curr_policy_version=step - 1, wait=True)
        outcome.waits.append(clock() - began)
        outcome.stocks.append((await buffer.info.call_one()).num_waiting)
        outcome.ages.append(Counter(step - 1 - versions.pop(i) for t in targets for i in t.episode_ids))
        await trainer.train_step.call(inputs, targets)
        await sync.push(step, inputs, wait=schedule.synchronous)
        if age is not None:
            await buffer.bound.call_one(age.after_step(_row(outcome.waits[-1], clock() - began)))
        outcome.ends.append(clock())
        outcome.bounds.append(age.age if age is not None else schedule.limit)

    places = costs.num_generators * costs.max_sequences // costs.group_size
    async with WeightSync(trainer, policy, buffer, canary=False) as sync:
        if schedule.synchronous:
            groups = costs.groups_per_step
            await synchronous_rl(
                rollout, learn, steps=schedule.steps, rollouts_per_step=groups, rollout_threads=groups
            )
        else:
            threads = THREADS_PER_PLACE * places
            await async_rl_loop(rollout, learn, steps=schedule.steps, rollout_threads=threads)
    outcome.info = await buffer.info.call_one()
    return outcome


def _episode(number: int, index: int, completion: Completion) -> Episode:
    return Episode(f"{number}/{index}", str(number), completion, "", 0.0, 0.0)


def _row(wait_s: float, step_s: float) -> Mapping[str, float]:
    """Batches stay good here, whatever their age: what bad ones do is no question of time."""
    return {"loss/ess": 1.0, "loss/logprob_gap": 0.0, "time/wait_s": wait_s, "time/step_s": step_s}
