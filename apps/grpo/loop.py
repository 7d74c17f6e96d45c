"""What a training step needs beside the machines: batches, checks, an evaluation, a place to save to."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from apps.grpo.config import GRPOConfig
from apps.grpo.machines import Machines
from apps.grpo.saving import Saves
from forge import observability
from forge.app import SAMPLES, Run
from forge.data_models import TrainInputs
from forge.grace import StopRequest
from forge.observability import phase
from forge.observability.metrics import put_back
from forge.rl import record
from forge.rl.best import BestKeeper
from forge.rl.evaluation import evaluate
from forge.rl.loops import Learn, Rollout, async_rl_loop, synchronous_rl
from forge.rl.minibatches import TrainBatch, updates
from forge.rl.weight_sync import WeightSync

BEST = "best"
"""Of a run's folder: the version that did best in evaluations."""

EVALUATED = "evaluation/version"
"""A metric that the row of every step has that was evaluated."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A run under way."""

    m: Machines
    config: GRPOConfig
    run: Run
    sync: WeightSync
    saves: Saves
    stop: StopRequest

    async def begin(self) -> None:
        """Everything to where the run was, if it goes on; and what is measured before the first step."""
        done = self.saves.resumed
        recorded = await self.saves.restore()
        self.run.started(done=done)
        record.rewind(self.run.folder / record.FOLDER, done)
        BestKeeper(self.run.folder / BEST)  # finishes what a kill left half done
        if self.m.bound is not None:
            await self.m.buffer.bound.call_one(self.m.bound.age)
        if done:
            await self.sync.resume(done)
        if self.is_evaluated(done) and (done == 0 or self.run.reopen(done, EVALUATED)):
            await self.stop.unless_asked(self.evaluate(done))
            await self.run.report(done)
        put_back(recorded)

    async def go(self, rollout: Rollout, learn: Learn) -> None:
        """Rollouts and steps: by turns where every batch is to be of the newest policy, else side by side."""
        config, span = self.config, {"first": self.saves.resumed + 1, "steps": self.config.steps}
        if config.max_policy_age == 0:
            await synchronous_rl(
                rollout,
                learn,
                rollouts_per_step=config.training.batch_size,
                waiting=await self.m.buffer.size.call_one() // config.grpo.n_samples,
                rollout_threads=config.rollout_threads,
                **span,
            )
        else:
            await async_rl_loop(rollout, learn, rollout_threads=config.rollout_threads, **span)

    async def batches(self, step: int) -> list[TrainBatch]:
        """The episodes of this step, in as many batches as it has minibatches; checked, and recorded."""
        m, config = self.m, self.config
        batches = await m.buffer.sample.call_one(
            curr_policy_version=step - 1, wait=True, minibatches=config.training.minibatches
        )
        batches = batches if config.training.minibatches > 1 else [batches]
        if config.record:  # first: what a check stops at is to be looked at
            episodes = await m.buffer.sampled.call_one()
            await asyncio.to_thread(record.write, self.run.folder / record.FOLDER, step, episodes, step - 1)
        m.checks.batch([targets for _, parts in batches for targets in parts], step)
        return batches

    async def update(self, batches: Sequence[TrainBatch], step: int) -> None:
        """The optimizer steps on these batches; the trainer has the devices alone, if it shares them."""
        m, epochs = self.m, self.config.training.ppo_epochs
        async with m.colocation.training():
            if step == self.saves.resumed + 1:  # layout and passes may be others than before
                await m.checks.start(m.trainer, *batches[0], version=step - 1)
            done = await updates(
                m.trainer, batches, epochs=epochs, seed=self.config.seed, step=step, loss=m.algorithm.loss
            )
        for each in done:
            m.checks.step(each.targets, each.result.metrics)
        m.algorithm.after_step([targets for _, parts in batches for targets in parts])

    async def push(self, batch: Sequence[TrainInputs], step: int) -> None:
        """The weights to the generators, beside the next step where nothing speaks against it: those that are
        evaluated are on all of them first, and on shared devices none is loaded while the trainer works."""
        is_evaluated, is_last = self.is_evaluated(step), step == self.config.steps
        wait = is_evaluated or is_last or self.m.colocation.is_on
        await self.sync.push(step, batch, must=is_evaluated, wait=wait)

    def is_evaluated(self, step: int) -> bool:
        """Whether there is an evaluation after this step."""
        every = self.config.evaluation.every
        return every > 0 and (step % every == 0 or step == self.config.steps)

    async def evaluate(self, step: int) -> None:
        """Asks the held-out questions; keeps the weights if they are the best so far."""
        keys, config = self.config.evaluation, self.config
        with phase("evaluate"):
            evaluation = await evaluate(
                self.m.policy,
                self.m.reward.grade_response.route,
                await self.m.dataset.held_out.call_one(),
                n=keys.n_samples,
                seed=config.seed,
                temperature=keys.temperature,
                max_tokens=keys.max_tokens or config.grpo.max_tokens,
                progress=partial(self.run.doing, "evaluation: questions answered"),
            )
            evaluation.write(self.run.folder / SAMPLES, step)
            best = BestKeeper(self.run.folder / BEST)
            await best.offer(step, evaluation, self.m.trainer.export.call)

    async def end_step(self, step: int) -> None:
        """The step's row of metrics, and what follows from it; a checkpoint if one is due."""
        if self.m.bound is not None:
            observability.record("staleness", bound=self.m.bound.age)
        row = await self.run.report(step)
        if self.m.bound is not None:
            await self.m.buffer.bound.call_one(self.m.bound.after_step(row))
        if step < self.config.steps and not self.stop.asked:  # else it is saved for good
            await self.saves.save_if_due(step)
