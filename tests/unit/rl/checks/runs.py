"""A run of a real replay buffer and a trainer that answers from its batch, sound unless it is spoilt."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from forge.actors.replay_buffer import ReplayBuffer
from forge.data_models import Completion, Episode, TrainInputs, TrainTargets
from forge.observability.metrics import drain
from forge.rl.checks import CheckOptions, Checks

MAX_TOKENS, SEQ_LEN, N_SAMPLES, GROUPS = 24, 40, 4, 4  # GROUPS: of a step
Group = tuple[list[Completion], list[float]]
Batch = tuple[list[TrainInputs], list[TrainTargets]]


def same(value: Any, _: int) -> Any:
    """Spoils nothing."""
    return value


@dataclass
class Spoilt:
    """What is done to a run that would be sound; each gets the value and the number of the group or step."""

    group: Callable[[Group, int], Group] = same
    episodes: Callable[[list[Episode], int], list[Episode]] = same  # behind the check of groups
    batch: Callable[[Batch, int], Batch] = same
    metrics: Callable[[dict[str, float], int], dict[str, float]] = same
    gradient_norms: tuple[float, float] = (0.5, 0.5001)


@dataclass
class Outcome:
    """What was told meanwhile."""

    fired: dict[str, float] = field(default_factory=dict)  # the metrics checks/num_*
    rejected: list[int] = field(default_factory=list)  # numbers of groups


def group_of(number: int, version: int, share: float) -> Group:
    """A sound group: answers of different lengths, some right."""
    rng = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    prompt = torch.randint(5, 99, (4 + number % 20,), generator=generator)
    most = min(MAX_TOKENS, SEQ_LEN - len(prompt))
    completions = []
    for _ in range(N_SAMPLES):
        size = rng.randint(1, most)
        completions.append(
            Completion(
                text="",
                token_ids=torch.randint(5, 99, (size,), generator=generator),
                logprobs=-3 * torch.rand(size, generator=generator),
                prompt_ids=prompt,
                generator_version=version,
                stop_reason="length" if size == most else "stop",
            )
        )
    return completions, [float(rng.random() < share) for _ in completions]


class Trainer:
    """Agrees with the generator, and with itself, but for as much rounding as bfloat16 has."""

    def __init__(self, generated: Sequence[TrainTargets], gradient_norms: tuple[float, float]) -> None:
        self._generated, self._gradient_norms = generated, gradient_norms
        self.logprobs = SimpleNamespace(route=self._logprobs)
        self.gradient_norms = SimpleNamespace(route=self._norms)

    async def _logprobs(self, *_: Any) -> list[Tensor]:
        return [t.generator_logprobs + 0.05 * _noise(t) * t.loss_mask for t in self._generated]

    async def _norms(self, *_: Any) -> tuple[float, float]:
        return self._gradient_norms


def _noise(targets: TrainTargets) -> Tensor:
    return torch.randn(targets.target_ids.shape, generator=torch.Generator().manual_seed(0))


def new_checks(options: CheckOptions, max_policy_age: int = 1) -> Checks:
    return Checks(options, max_tokens=MAX_TOKENS, seq_len=SEQ_LEN, max_policy_age=max_policy_age)


def run(
    checks: Checks,
    spoilt: Spoilt | None = None,
    *,
    steps: range = range(1, 61),
    lag: int = 0,
    outcome: Outcome | None = None,
) -> Outcome:
    """Every step trains on GROUPS groups, sampled by a policy `lag` versions old, of which more and more are
    right."""
    drain()
    outcome = outcome or Outcome()
    try:
        asyncio.run(_run(checks, spoilt or Spoilt(), steps, lag, outcome))
    finally:
        told = {name: stat.total for name, stat in drain().items() if name.startswith("checks/")}
        outcome.fired |= {name.removeprefix("checks/num_"): total for name, total in told.items()}
    return outcome


async def _run(checks: Checks, spoilt: Spoilt, steps: range, lag: int, outcome: Outcome) -> None:
    buffer = ReplayBuffer(GROUPS * N_SAMPLES // 2, max_policy_age=1, dp_size=2)
    number = (steps[0] - 1) * GROUPS
    for step in steps:
        for _ in range(GROUPS):
            sound = partial(group_of, version=max(0, step - 1 - lag), share=0.2 + 0.6 * step / 60)
            while not checks.group(number, *(found := spoilt.group(sound(number), number))):
                outcome.rejected.append(number)
                number += 1
            await buffer.add(*spoilt.episodes(_episodes(number, found), number))
            number += 1
        sampled = await buffer.sample(curr_policy_version=step - 1, wait=True)
        assert sampled is not None
        inputs, targets = spoilt.batch(sampled, step)
        checks.batch(targets, step)
        if step == steps[0]:
            trainer = cast(Any, Trainer(sampled[1], spoilt.gradient_norms))
            await checks.start(trainer, inputs, targets, version=step - 1)
        num_tokens = sum(float(t.loss_mask.sum()) for t in targets)
        checks.step(targets, spoilt.metrics({"num_tokens": num_tokens, "logprob_gap": 0.04}, step))


def _episodes(number: int, found: Group) -> list[Episode]:
    completions, rewards = found
    return [
        Episode(f"{number}/{i}", str(number), c, "", reward, reward - 0.5, c.logprobs + 0.02)
        for i, (c, reward) in enumerate(zip(completions, rewards, strict=True))
    ]
