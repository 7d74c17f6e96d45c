"""GRPO (arXiv 2402.03300) and its kin: ask, answer, grade, compare, learn.

python -m apps.grpo.main --config apps/grpo/smollm2_135m.yaml
"""

import asyncio
import sys
from functools import partial

from torch import Tensor

from apps.grpo.config import GRPOConfig, load_config
from apps.grpo.finish import export, is_over
from apps.grpo.loop import Loop
from apps.grpo.machines import Machines, plan, start
from apps.grpo.replay import replay
from apps.grpo.resume import resume_point
from apps.grpo.rollouts import rollouts_only
from apps.grpo.saving import Saves
from forge.actors.generator import call_seed
from forge.app import Run, run_app
from forge.data.dataset import DatasetActor
from forge.data_models import Completion, Episode, Sample
from forge.grace import StopRequest
from forge.observability import phase
from forge.rl.advantage import distillation_advantages
from forge.rl.grading import ComputeAdvantages, RewardActor
from forge.rl.weight_sync import WeightSync

__all__ = ["ComputeAdvantages", "DatasetActor", "RewardActor", "learn", "main", "rollout"]


async def rollout(m: Machines, config: GRPOConfig) -> None:
    """One group: ask a question n times, grade the answers, compare them, remember them."""
    number = await m.buffer.admit.call_one(config.grpo.n_samples)
    sample, completions, rewards = await ask(m, config, number)
    while not m.is_useful(number, completions, rewards):
        number = await m.buffer.restart.call_one(number)
        sample, completions, rewards = await ask(m, config, number)
    references = await refer(m, completions)
    advantages = await compare(m, config, completions, rewards, references)
    episodes = [
        Episode(f"{number}/{i}", str(number), completion, sample["target"], reward, advantage, reference)
        for i, (completion, reward, advantage, reference) in enumerate(
            zip(completions, rewards, advantages, references, strict=True)
        )
    ]
    await m.buffer.add.call_one(*episodes)


async def ask(m: Machines, config: GRPOConfig, number: int) -> tuple[Sample, list[Completion], list[float]]:
    """The question of this number, the answers to it, and the reward of each."""
    sample = await m.dataset.sample.call_one(number)
    seed = {"seed": call_seed(config.seed, number)} if config.generator.deterministic else {}
    completions = await m.policy.generate.route(sample["request"], **seed)
    return sample, completions, await grade(m, sample["request"], completions, sample["target"])


async def grade(m: Machines, prompt: str, completions: list[Completion], target: str) -> list[float]:
    """The reward of each completion."""
    return await asyncio.gather(
        *(
            m.reward.evaluate_response.route(prompt=prompt, response=c.text, target=target)
            for c in completions
        )
    )


async def refer(m: Machines, completions: list[Completion]) -> list:
    """Log-probabilities of each completion under the reference model, or the teacher; without one, None."""
    if m.ref_model is None:
        return [None] * len(completions)
    return await m.ref_model.logprobs.route(completions)


async def compare(
    m: Machines, config: GRPOConfig, completions: list[Completion], rewards: list[float], references: list
) -> list[float] | list[Tensor]:
    """How much better each completion is than others; or, token by token, than its teacher finds it."""
    if config.teacher is not None:
        return [distillation_advantages(c.logprobs, r) for c, r in zip(completions, references, strict=True)]
    shaped = m.algorithm.shape(rewards, completions, references)
    return await m.advantages.compute.route(shaped, rewards)


async def learn(loop: Loop, step: int) -> bool:
    """One step on fresh episodes, then the generators get the new weights, beside the next step; whether to
    go on. A request to stop ends the wait; what has begun is finished."""
    with phase("wait"):
        await loop.m.buffer.ready.call_one(step - 1)
    with loop.stop.held():
        with phase("train"):
            batches = await loop.batches(step)
            await loop.update(batches, step)
        with phase("push"):
            await loop.push(batches[0][0], step)
        if loop.is_evaluated(step):
            await loop.stop.unless_asked(loop.evaluate(step))
        await loop.end_step(step)
    return not loop.stop.asked


async def main(config: GRPOConfig, run: Run) -> None:
    """A run from its beginning, or where it was killed; the trained model ends as a Hugging Face folder."""
    if config.replay is not None:
        return await replay(config, run)
    if config.rollout_only:
        return await rollouts_only(config, run, rollout)
    point = resume_point(config, run)
    if await is_over(config, run, point):
        return
    m = await start(config, run.folder, point)
    interval, canary = config.training.sync_interval, config.weights.canary
    async with WeightSync(m.trainer, m.policy, m.buffer, interval=interval, canary=canary) as sync:
        with StopRequest() as stop:
            loop = Loop(m, config, run, sync, Saves(m, config, run.folder, point.named), stop)
            await loop.begin()
            await stop.unless_asked(loop.go(partial(rollout, m, config), partial(learn, loop)))
            await loop.saves.save(run.step)
    if stop.asked:
        run.interrupted()
    await export(m.trainer, run.folder, loop.saves.named)


if __name__ == "__main__":
    sys.exit(run_app(main, load_config, plan))
