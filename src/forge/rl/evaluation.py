"""[3] Evaluation: questions that are never trained on, and what the policy of the moment makes of them."""

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

from forge.actors.generator import call_seed
from forge.controller import ActorHandle, Service
from forge.data_models import Completion, Sample
from forge.errors import ForgeError
from forge.observability import record
from forge.rl.pass_at_k import mean_pass_at_k

logger = logging.getLogger(__name__)

_EVALUATION = -1  # in a call's seed stands where a training question has its number


class Grade(Protocol):
    """The reward of one answer, as `RewardActor.grade_response` gives it."""

    def __call__(self, *, prompt: str, response: str, target: str) -> Awaitable[float]: ...


@dataclass(frozen=True, slots=True)
class Answers:
    """What a question was answered, n times, and what each answer was worth."""

    sample: Sample
    completions: list[Completion]
    rewards: list[float]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The answers to all held-out questions, equally many to each."""

    answers: list[Answers]
    right_from: float = 1.0  # an answer with this reward or more is right, for pass@k

    @property
    def score(self) -> float:
        """The mean reward: avg@n."""
        return fmean(reward for each in self.answers for reward in each.rewards)

    @property
    def versions(self) -> list[int]:
        """The versions of the weights that the tokens were sampled from, ascending."""
        return sorted({v for each in self.answers for c in each.completions for v in _versions_of(c)})

    def metrics(self) -> dict[str, float]:
        """avg@n and its standard error over questions, pass@k, tokens of an answer, the share of those that
        were cut off, the oldest version of the weights, and counts."""
        completions = [c for each in self.answers for c in each.completions]
        means = [fmean(each.rewards) for each in self.answers]
        num_right = [sum(reward >= self.right_from for reward in each.rewards) for each in self.answers]
        n = len(self.answers[0].rewards)
        return {
            f"avg@{n}": self.score,
            **({"stderr": stdev(means) / math.sqrt(len(means))} if len(means) > 1 else {}),
            **{f"pass@{k}": value for k, value in mean_pass_at_k(num_right, n).items()},
            "completion_length": fmean(len(c.token_ids) for c in completions),
            "truncated": fmean(c.stop_reason == "length" for c in completions),
            "version": self.versions[0],
            "num_versions": len(self.versions),
            "num_questions": len(self.answers),
        }

    def write(self, path: Path, step: int) -> None:
        """Appends a line for each question: step, question, target, answers, rewards."""
        with path.open("a", encoding="utf-8") as file:
            for each in self.answers:
                line = {
                    "step": step,
                    "question": each.sample.get("question", each.sample["request"]),
                    "target": each.sample["target"],
                    "answers": [completion.text for completion in each.completions],
                    "rewards": each.rewards,
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


async def evaluate(
    policy: ActorHandle | Service,
    grade: Grade,
    samples: Sequence[Sample],
    *,
    n: int,
    seed: int | None = None,
    concurrency: int = 64,
    right_from: float = 1.0,
    progress: Callable[[int, int], None] = lambda answered, asked: None,
    **sampling: Any,
) -> Evaluation:
    """Asks each question n times, grades the answers, and records metrics under "evaluation".

        evaluation = await evaluate(policy, reward.grade_response.route, samples, n=4, max_tokens=256)

    seed: each question then has a seed of its own, the same in every evaluation: evaluations differ by their
    weights and not by their luck. concurrency: questions that are asked at a time, so that others who ask the
    same generators are not kept waiting behind all of them. progress: called whenever a question is answered,
    with the number of these and that of all. sampling: further keys of `Generator.generate`.

    While it runs the generators should get no new weights; answers that come from several versions are told
    and `Evaluation.versions` has them. ForgeError without questions; the first error of a call is raised,
    and the others are cancelled.
    """
    if not samples:
        raise ForgeError("there is nothing to evaluate: no questions were given")
    free = asyncio.Semaphore(concurrency)
    answered = 0

    async def answer(number: int, sample: Sample) -> Answers:
        seeded = {} if seed is None else {"seed": call_seed(seed, _EVALUATION, number)}
        async with free:
            request, target = sample["request"], sample["target"]
            completions = await policy.generate.route(request, n=n, **seeded, **sampling)
            grades = (grade(prompt=request, response=c.text, target=target) for c in completions)
            rewards = await asyncio.gather(*grades)
        nonlocal answered
        answered += 1
        progress(answered, len(samples))
        return Answers(sample, completions, rewards)

    try:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(answer(i, sample)) for i, sample in enumerate(samples)]
    except BaseExceptionGroup as group:  # the first error is why there are others
        first = group.exceptions[0]
        raise first from first.__cause__
    evaluation = Evaluation([task.result() for task in asked], right_from)
    if len(evaluation.versions) > 1:
        logger.warning(
            "this evaluation is of no single policy: its answers come from versions %s of the weights",
            evaluation.versions,
        )
    record("evaluation", **evaluation.metrics())
    return evaluation


def _versions_of(completion: Completion) -> Sequence[int]:
    if completion.token_versions is None:
        return [completion.generator_version]
    return completion.token_versions.unique().tolist()
