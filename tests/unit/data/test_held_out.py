"""Held-out questions: distinct, decided by the seed, and never among those that are trained on."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from forge.data.dataset import DatasetActor
from forge.data.held_out import HeldOut
from forge.data.questions import Questions
from forge.errors import ConfigError, DatasetError

CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 400}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets_cache"))


def write(file: Path, questions: list[str], **columns: str) -> Path:
    rows = [{"question": question, "answer": f"{len(question)}", **columns} for question in questions]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def asked(tokenizer: Path, count: int, **arguments: Any) -> tuple[list[str], list[str]]:
    """The questions of a new actor: those held out, and those of the first numbers."""

    async def ask() -> tuple[list[str], list[str]]:
        actor = DatasetActor(tokenizer=str(tokenizer), **arguments)
        await actor.setup()
        held_out = [sample.get("question", "") for sample in await actor.held_out()]
        return held_out, [(await actor.sample(n)).get("question", "") for n in range(count)]

    return asyncio.run(ask())


@pytest.mark.parametrize("split", [None, "test"])
def test_no_question_of_a_task_is_both_held_out_and_trained_on(tiny_llama: Path, split: str | None) -> None:
    task = {"path": "reasoning_gym/chain_sum", "options": CHAIN_SUM}
    every = set(asked(tiny_llama, 400, **task)[1])
    held_out, trained = asked(tiny_llama, 800, **task, held_out={"size": 60, "split": split})
    assert len(held_out) == len(set(held_out)) == 60
    assert set(trained) == every - set(held_out)
    again, other = (asked(tiny_llama, 0, **task, seed=s, held_out={"size": 60})[0] for s in (0, 1))
    assert set(other) != set(again)
    if split is None:
        assert again == held_out


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_with_a_held_out_question_are_left_out_however_they_are_spaced(
    tiny_llama: Path, tmp_path: Path, streaming: bool
) -> None:
    questions = [f"What  is {n % 20} + 1?\n" if n % 3 else f" What is {n % 20} + 1?" for n in range(60)]
    write(tmp_path / "train.jsonl", questions)
    write(tmp_path / "test.jsonl", ["What is 4 + 1?", "What is 4  + 1?", "What is 7 + 1?", "What is new?"])
    held_out, trained = asked(
        tiny_llama,
        162,
        path=str(tmp_path),
        streaming=streaming,
        held_out={"size": 3, "split": "test"},
    )
    assert {" ".join(question.split()) for question in held_out} == {
        "What is 4 + 1?",
        "What is 7 + 1?",
        "What is new?",
    }
    assert sorted(trained) == sorted([q for q in questions if not {"4", "7"} & set(q.split())] * 3)


def test_held_out_data_may_have_its_own_path_and_columns(tiny_llama: Path, tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", ["one", "two"])
    other = write(tmp_path / "b.jsonl", ["ignored"], problem="two")
    wanted = {"size": 1, "path": str(other), "prompt_column": "problem"}
    assert asked(tiny_llama, 3, path=str(train), held_out=wanted) == (["two"], ["one"] * 3)


def test_a_task_of_its_own_does_not_get_the_options_of_the_training_task() -> None:
    training = Questions(path="reasoning_gym/chain_sum", options=CHAIN_SUM)
    same, other = (
        HeldOut.of({"size": 1, "path": path}, training).questions
        for path in (None, "reasoning_gym/basic_arithmetic")
    )
    assert (same.options, other.options) == (CHAIN_SUM, None)


@pytest.mark.parametrize(
    ("held_out", "error", "message"),
    [
        ({"size": 3, "from": "x"}, ConfigError, "no key 'from'; it has .'size', 'path'"),
        ({"split": "test"}, ConfigError, "size must be a number of questions, at least 1, got None"),
        ({"size": 0}, ConfigError, "at least 1, got 0"),
        ({"size": 5}, DatasetError, "5 questions are to be held out, and .* has 4 different ones"),
        ({"size": 4}, DatasetError, "none is left to train on: hold out less"),
        ({"size": 1, "prompt_column": "q"}, DatasetError, "no column 'q'"),
    ],
)
def test_what_can_not_be_held_out_is_refused(
    tiny_llama: Path, tmp_path: Path, held_out: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = write(tmp_path / "data.jsonl", ["a", "b", "c", "d", "a"])
    with pytest.raises(error, match=message):
        asked(tiny_llama, 0, path=str(path), held_out=held_out)
