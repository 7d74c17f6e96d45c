"""Evaluation: who is asked what, what it comes to, and what is kept of it."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge.data.rewards import ExactMatchReward
from forge.data_models import Completion, Sample
from forge.errors import ForgeError, RewardError
from forge.observability.metrics import drain, merge
from forge.rl.best import Best, BestKeeper
from forge.rl.evaluation import Answers, Evaluation, evaluate
from forge.rl.grading import RewardActor


def completion(text: str, versions: list[int], stop_reason: str = "stop") -> Completion:
    return Completion(
        text,
        torch.zeros(len(versions), dtype=torch.int64),
        torch.zeros(len(versions)),
        generator_version=min(versions),
        stop_reason=stop_reason,
        token_versions=torch.tensor(versions),
    )


class Policy:
    """A generator whose answers are given by question; it notes what it is asked, and how many at a time."""

    def __init__(self, answers: dict[str, list[Completion]]) -> None:
        self.generate = self
        self.answers = answers
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.running = self.most_running = 0

    async def route(self, prompt: str, **sampling: Any) -> list[Completion]:
        self.calls.append((prompt, sampling))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        return self.answers[prompt]


def question(text: str, target: str) -> Sample:
    return {"request": f"<{text}>", "target": target, "question": text}


def score(rewards: list[list[float]], versions: list[int]) -> Evaluation:
    return Evaluation(
        [Answers(question("q", "a"), [completion("a", versions)] * len(each), each) for each in rewards]
    )


def run(policy: Policy, samples: list[Sample], **keywords: Any) -> Evaluation:
    grade = RewardActor([ExactMatchReward()]).grade_response
    return asyncio.run(evaluate(policy, grade, samples, **keywords))  # pyright: ignore[reportArgumentType]


def test_every_question_is_asked_n_times_and_what_comes_is_recorded_as_evaluation_only() -> None:
    answers = {
        "<a>": [completion("1", [3] * 4), completion("1", [3] * 6)],
        "<b>": [completion("1", [3] * 9, "length"), completion("2", [3])],
        "<c>": [completion("0", [3]), completion("0", [3])],
    }
    samples = [question("a", "1"), question("b", "2"), question("c", "3")]
    drain()
    policy = Policy(answers)
    evaluation = run(policy, samples, n=2, max_tokens=9, temperature=0.7)
    assert policy.calls == [(s["request"], {"n": 2, "max_tokens": 9, "temperature": 0.7}) for s in samples]
    assert [each.rewards for each in evaluation.answers] == [[1, 1], [0, 1], [0, 0]]
    means = np.array([1, 0.5, 0])
    assert merge([drain()]) == pytest.approx(
        {
            "evaluation/avg@2": means.mean(),
            "evaluation/pass@1": means.mean(),
            "evaluation/pass@2": 2 / 3,
            "evaluation/stderr": means.std(ddof=1) / 3**0.5,
            "evaluation/completion_length": (4 + 6 + 9 + 1 + 1 + 1) / 6,
            "evaluation/truncated": 1 / 6,
            "evaluation/version": 3,
            "evaluation/num_versions": 1,
            "evaluation/num_questions": 3,
        }
    )


def test_calls_are_few_at_a_time_and_their_seeds_differ_and_are_the_same_the_next_time() -> None:
    samples = [question(str(i), "a") for i in range(40)]
    policy = Policy({s["request"]: [completion("a", [0])] for s in samples})
    told: list[tuple[int, int]] = []
    for _ in range(2):
        run(policy, samples, n=1, seed=5, concurrency=6, progress=lambda *counts: told.append(counts))
    assert policy.most_running == 6 and told == [(i, 40) for i in range(1, 41)] * 2
    first, second = ({p: s["seed"] for p, s in policy.calls[i : i + 40]} for i in (0, 40))
    assert first == second and len(set(first.values())) == 40
    run(policy, samples[:1], n=1, seed=6)
    assert policy.calls[-1][1]["seed"] != first["<0>"]


def test_answers_of_several_versions_are_told(caplog: pytest.LogCaptureFixture) -> None:
    policy = Policy({"<a>": [completion("a", [2, 2, 3]), completion("a", [3])]})
    with caplog.at_level(logging.WARNING):
        evaluation = run(policy, [question("a", "a")], n=2)
    assert evaluation.versions == [2, 3] and "versions [2, 3]" in caplog.text
    assert evaluation.metrics()["num_versions"] == 2


def test_what_fails_is_raised_as_it_is_and_nothing_is_recorded() -> None:
    class Broken(RewardActor):
        def grade(self, prompt: str, completion: str, metadata: dict[str, Any]) -> float:
            raise ValueError("no")

    policy = Policy({f"<{i}>": [completion("a", [0])] for i in range(3)})
    drain()
    grade = Broken().grade_response
    with pytest.raises(RewardError, match=r"Broken\.grade raised ValueError: no"):
        asyncio.run(evaluate(policy, grade, [question(str(i), "a") for i in range(3)], n=1))  # pyright: ignore
    with pytest.raises(ForgeError, match="no questions"):
        run(policy, [], n=1)
    assert not drain()


def test_each_answer_is_written_down(tmp_path: Path) -> None:
    policy = Policy({"<a>": [completion("ä", [0]), completion("1", [0])], "<b>": [completion("x", [0])] * 2})
    evaluation = run(policy, [question("a", "1"), {"request": "<b>", "target": "y"}], n=2)
    for step in (0, 5):
        evaluation.write(tmp_path / "samples.jsonl", step)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text("utf-8").splitlines()]
    assert lines[2:] == [
        {"step": 5, "question": "a", "target": "1", "answers": ["ä", "1"], "rewards": [0, 1]},
        {"step": 5, "question": "<b>", "target": "y", "answers": ["x", "x"], "rewards": [0, 0]},
    ]
    assert [line["step"] for line in lines] == [0, 0, 5, 5]


def offer(keeper: BestKeeper, step: int, evaluation: Evaluation) -> bool:
    async def export(folder: str) -> None:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "weights").write_text(str(step))

    return asyncio.run(keeper.offer(step, evaluation, export))


def test_the_first_of_the_best_is_kept(tmp_path: Path) -> None:
    keeper = BestKeeper(tmp_path / "best")
    scores = {0: 0.25, 10: 0.5, 20: 0.5, 30: 0.0, 40: 0.75}
    kept = {step: offer(keeper, step, score([[value]], [step])) for step, value in scores.items()}
    assert kept == {0: True, 10: True, 20: False, 30: False, 40: True}
    assert not offer(keeper, 50, score([[1.0]], [40, 50]))  # of no version
    assert not offer(keeper, 50, score([[1.0]], [49]))  # of one that the trainer has left behind
    again = BestKeeper(tmp_path / "best")
    assert again.best == keeper.best == Best(40, 0.75)
    assert (tmp_path / "best/weights").read_text() == "40"
    assert os.listdir(tmp_path) == ["best"]


def test_what_is_being_exported_is_finished_before_a_cancellation_comes(tmp_path: Path) -> None:
    keeper = BestKeeper(tmp_path / "best")

    async def slow_export(folder: str) -> None:
        Path(folder).mkdir()
        await asyncio.sleep(0.02)
        (Path(folder) / "weights").write_text("all")

    async def stopped() -> None:
        offered = asyncio.create_task(keeper.offer(3, score([[1.0]], [3]), slow_export))
        await asyncio.sleep(0.005)
        offered.cancel()
        with pytest.raises(asyncio.CancelledError):
            await offered

    asyncio.run(stopped())
    assert BestKeeper(tmp_path / "best").best == Best(3, 1.0)
    assert (tmp_path / "best/weights").read_text() == "all"


class Killed(Exception):
    """Nothing is done after it."""


@pytest.mark.parametrize("killed_at", range(7))
def test_a_kill_leaves_one_best_version_with_its_own_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    """Killed before the n-th change on the disk, of those after the weights are written."""
    keeper = BestKeeper(tmp_path / "best")
    offer(keeper, 10, score([[0.5]], [10]))
    changes = iter(range(100))

    def until_killed(change: Any) -> Any:
        def changed(*args: Any, **keywords: Any) -> Any:
            if next(changes) >= killed_at:
                raise Killed
            return change(*args, **keywords)

        return changed

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", until_killed(os.replace))
        patched.setattr("shutil.rmtree", until_killed(shutil.rmtree))
        with contextlib.suppress(Killed):
            offer(keeper, 20, score([[0.75]], [20]))
    again = BestKeeper(tmp_path / "best")
    assert again.best in (Best(10, 0.5), Best(20, 0.75))
    assert (tmp_path / "best/weights").read_text() == str(again.best.step)
    assert offer(again, 30, score([[1.0]], [30]))
    assert os.listdir(tmp_path) == ["best"]
