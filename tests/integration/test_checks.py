"""The checks beside a real trainer and a real buffer: silent while they are sound."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import Tensor

from forge.actors.replay_buffer import ReplayBuffer
from forge.actors.trainer import TitanTrainer
from forge.data_models import Completion, Episode
from forge.errors import InvariantBroken
from forge.observability.metrics import drain
from forge.rl.checks import CheckOptions, Checks
from forge.rl.loss import GRPOLoss
from tests.integration.trainer_cases import WeightedLogprobs, batch_of, completion_groups, start_trainer

OPTIONS = CheckOptions(ratio="stop", reference_kl="stop", gradient_scale="stop", completions="off")


@dataclass
class Run:
    """Two groups a step, always the same completions, with the log-probabilities of the untrained model."""

    trainer: TitanTrainer
    buffer: ReplayBuffer
    checks: Checks
    number: int = 0

    async def roll(self, version: int, spoil: str | None = None) -> None:
        """Groups into the buffer. spoil: the episode whose log-probabilities are those of half the
        temperature."""
        groups = completion_groups(lengths=((3, 7, 2), (5, 9, 4)))
        inputs, targets = batch_of(groups)
        [logprobs] = await self.trainer.logprobs([inputs], [targets])
        hot = replace(targets, temperature=targets.temperature / 2)
        [other] = await self.trainer.logprobs([inputs], [hot])
        rows = iter(zip(logprobs, other, strict=True))
        for group in groups:
            completions, references = [], []
            for i, c in enumerate(group):
                own, wrong = (row[: len(c.token_ids)] for row in next(rows))
                references.append(own)
                sampled = wrong if f"{self.number}/{i}" == spoil else own
                completions.append(
                    replace(c, logprobs=sampled, generator_version=version, stop_reason="stop")
                )
            await self._add(completions, references)

    async def _add(self, completions: list[Completion], references: list[Tensor]) -> None:
        rewards = [0.0, 1.0, 0.0]
        assert self.checks.group(self.number, completions, rewards)
        await self.buffer.add(
            *(
                Episode(f"{self.number}/{i}", str(self.number), c, "", r, r - 0.5, reference)
                for i, (c, r, reference) in enumerate(zip(completions, rewards, references, strict=True))
            )
        )
        self.number += 1

    async def learn(self, step: int, version: int | None = None, *, lose_token: bool = False) -> None:
        """One step as a user's loop has it. version: that the buffer is told."""
        told = step - 1 if version is None else version
        inputs, targets = await self.buffer.sample(curr_policy_version=told, wait=True)  # pyright: ignore
        self.checks.batch(targets, step)
        if step == 1:
            trainer = SimpleNamespace(
                logprobs=SimpleNamespace(route=self.trainer.logprobs),
                gradient_norms=SimpleNamespace(route=self.trainer.gradient_norms),
            )
            await self.checks.start(cast(Any, trainer), inputs, targets)
        given = targets
        if lose_token:
            given = [
                replace(t, loss_mask=t.loss_mask & (t.target_ids != t.target_ids[0, 0])) for t in targets
            ]
        result = await self.trainer.train_step(inputs, given)
        self.checks.step(targets, result.metrics)


async def start_run(folder: Path, loss: Any, **training: Any) -> Run:
    trainer = await start_trainer(folder, loss, training=training)
    checks = Checks(OPTIONS, max_tokens=16, max_policy_age=1, dtype="float32")
    return Run(trainer, ReplayBuffer(6, max_policy_age=1), checks)


@contextmanager
def broken(invariant: str, episode: str) -> Iterator[None]:
    with pytest.raises(InvariantBroken, match=f"check {invariant}: .*episodes? {episode}"):
        yield


class WrongNormalizer(WeightedLogprobs):
    """Averages over sequences, and says otherwise."""

    normalize_by = "tokens"


def test_tokens_that_are_lost_and_versions_that_are_not_told_stop_a_run_that_was_sound(
    tiny_llama: Path,
) -> None:
    async def main() -> None:
        run = await start_run(tiny_llama, GRPOLoss(beta=0.1), max_tokens_per_pass=40)
        drain()
        for step in (1, 2, 3):
            await run.roll(version=step - 1)
            await run.learn(step)
        assert not [name for name in drain() if name.startswith("checks/")]
        await run.roll(version=3)
        with broken("token_counts", "6/0"):
            await run.learn(4, lose_token=True)
        await run.roll(version=3)
        with broken("age", "8/0"):  # the loop does not tell the buffer how far the trainer is
            await run.learn(6, version=3)

    asyncio.run(main())


def test_a_generator_of_another_temperature_is_told_before_the_first_update(tiny_llama: Path) -> None:
    async def main() -> None:
        run = await start_run(tiny_llama, GRPOLoss(beta=0.1))
        await run.roll(version=0, spoil="1/2")
        with broken("ratio", "1/2"):
            await run.learn(1)
        assert (await run.trainer.progress()).num_steps == 0

    asyncio.run(main())


def test_a_loss_that_micro_batches_change_is_told_before_the_first_update(tiny_llama: Path) -> None:
    async def main() -> None:
        run = await start_run(tiny_llama, WrongNormalizer())
        await run.roll(version=0)
        with broken("gradient_scale", "0/0"):
            await run.learn(1)
        assert (await run.trainer.progress()).num_steps == 0

    asyncio.run(main())
