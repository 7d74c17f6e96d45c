"""GRPO (arXiv 2402.03300): ask, answer, grade, compare, learn.

python -m apps.grpo.main --config apps/grpo/smollm2_135m.yaml
"""

import asyncio
import sys
from functools import partial
from uuid import uuid4

from apps.grpo.config import GRPOConfig, load_config
from apps.grpo.machines import Machines, placement, start
from forge.app import Run, run_app
from forge.data.dataset import DatasetActor
from forge.data_models import Completion, Episode
from forge.observability import phase
from forge.rl.checks import check_weights_arrived, first_text
from forge.rl.grading import ComputeAdvantages, RewardActor
from forge.rl.loops import async_rl_loop

__all__ = ["ComputeAdvantages", "DatasetActor", "RewardActor", "learn", "main", "rollout"]


async def rollout(m: Machines, config: GRPOConfig) -> None:
    """One group: ask a question n times, grade the answers, compare them, remember them."""
    await m.buffer.admit.call_one(config.grpo.n_samples)
    sample = await m.dataset.sample.call_one()
    completions = await m.policy.generate.route(sample["request"])
    rewards, references = await asyncio.gather(
        grade(m, sample["request"], completions, sample["target"]), refer(m, completions)
    )
    advantages = await m.advantages.compute.route(rewards)
    group = uuid4().hex
    episodes = [
        Episode(f"{group}/{i}", group, completion, sample["target"], reward, advantage, reference)
        for i, (completion, reward, advantage, reference) in enumerate(
            zip(completions, rewards, advantages, references, strict=True)
        )
    ]
    await m.buffer.add.call_one(*episodes)


async def grade(m: Machines, prompt: str, completions: list[Completion], target: str) -> list[float]:
    """The reward of each completion."""
    return await asyncio.gather(
        *(
            m.reward.evaluate_response.route(prompt=prompt, response=c.text, target=target)
            for c in completions
        )
    )


async def refer(m: Machines, completions: list[Completion]) -> list:
    """The reference model's log-probabilities of each completion; without a reference, None for each."""
    if m.ref_model is None:
        return [None] * len(completions)
    return await m.ref_model.logprobs.route(completions)


async def learn(m: Machines, config: GRPOConfig, run: Run, step: int) -> None:
    """One training step on fresh episodes; then the generators get the new weights."""
    with phase("wait"):
        inputs, targets = await m.buffer.sample.call_one(curr_policy_version=step - 1, wait=True)
    with phase("train"):
        await m.trainer.train_step.call(inputs, targets)
    if step % config.training.sync_interval == 0:
        with phase("push"):
            await m.trainer.push_weights.call(step)
        with phase("update"):
            await m.policy.update_weights.fanout(step)
        with phase("check"):
            await check_weights_arrived(m.trainer, m.policy, first_text(inputs[0]))
    await run.report(step)


async def main(config: GRPOConfig, run: Run) -> None:
    """Rollouts and training side by side; the trained model ends as a Hugging Face folder."""
    m = await start(config, run.folder / "bad_batches")
    run.started()
    await async_rl_loop(
        partial(rollout, m, config),
        partial(learn, m, config, run),
        steps=config.steps,
        rollout_threads=config.rollout_threads,
    )
    await m.trainer.export.call(str(run.folder / "model"))


if __name__ == "__main__":
    sys.exit(run_app(main, load_config, placement))
