"""Conversations in each form they come in, what is wrong with some, and which are held out."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from forge.data.chats import Chats, hold_out, open_chats, question_of
from forge.errors import AssetError, DatasetError

CORPUS = "pkg://chatterbot_corpus/data/english"
WANTED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets_cache"))


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chats_of(*questions: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": q}, {"role": "assistant", "content": f"to {q}"}] for q in questions]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": WANTED, "source": "x"}, {}),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, {}),
        ({"q": "Hi", "a": "Hello"}, {"prompt_column": "q", "answer_column": "a"}),
    ],
)
def test_every_form_gives_the_same_conversation(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], suffix: str
) -> None:
    chats = open_chats(write(tmp_path / f"data.{suffix}", [row, row]), **columns)
    assert len(chats) == 2 and chats[1] == WANTED


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, "row 1: messages must be a list of {role, content}"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "row 1: messages[0].role must be one of"),
        (
            {"messages": [WANTED[0], {"role": "assistant", "content": None}]},
            "row 1: messages[1].content must be text, got None",
        ),
        ({"messages": [{"role": "user"}]}, "row 1: messages[0] must have role and content"),
        ({"messages": WANTED[:1]}, "row 1: no assistant turn with text"),
        ({"messages": WANTED[::-1]}, "row 1 begins with the assistant"),
        ({"messages": None}, "row 1: messages must be a list of {role, content}, got None"),
        (
            {"messages": [WANTED[0], {**WANTED[1], "reasoning_content": "It greets."}]},
            "row 1: messages[1].reasoning_content would not be learnt, only content is",
        ),
        ({"messages": WANTED, "tools": [{"name": "search"}]}, "row 1: tools are not shown to the model"),
        (
            {"messages": [*WANTED, WANTED[0], {**WANTED[1], "content": " "}]},
            "row 1: the last answer is empty",
        ),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], words: str) -> None:
    chats = Chats([{"messages": WANTED}, row], "dataset d", None, None, needs_last_answer=True)
    with pytest.raises(DatasetError) as caught:
        hold_out(chats, 0, 0)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_columns_say_which_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"q": "Hi", "a": "Hello"}])
    for columns, words in (
        ({}, r"neither a column 'messages' nor 'conversations', but \['a', 'q'\]"),
        ({"prompt_column": "q", "answer_column": "b"}, r"no column 'b': its columns are \['a', 'q'\]"),
        ({"prompt_column": "q"}, "go together"),
    ):
        with pytest.raises(DatasetError, match=words):
            open_chats(path, **columns)


def test_a_corpus_inside_a_package_alternates_user_and_assistant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my_corpus" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "my_corpus" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "a.yml").write_text("conversations:\n- - Hi\n  - Hello\n- a slip\n")
    (folder / "b.yml").write_text("conversations:\n- - Up?\n  - Yes.\n  - Good.\n- - Year?\n  - 1963\n")
    monkeypatch.syspath_prepend(tmp_path)
    chats = open_chats("pkg://my_corpus/data")
    assert len(chats) == 3 and chats[0] == WANTED
    assert [message["role"] for message in chats[1]] == ["user", "assistant", "user"]
    assert len(open_chats("pkg://my_corpus/data/a.yml")) == 1
    with pytest.raises(DatasetError, match=r"row 2: messages\[1\].content must be text, got 1963"):
        chats[2]
    with pytest.raises(DatasetError, match="one split, train, got 'test': set dataset.split to train"):
        open_chats("pkg://my_corpus/data", split="test")
    with pytest.raises(AssetError, match=r"no data/c.yml: its YML files are \['data/a.yml', 'data/b.yml'\]"):
        open_chats("pkg://my_corpus/data/c.yml")


@pytest.mark.skipif(importlib.util.find_spec("chatterbot_corpus") is None, reason="needs chatterbot-corpus")
def test_the_packaged_corpus_is_898_different_conversations_of_which_no_question_is_on_both_sides() -> None:
    chats = open_chats(CORPUS)
    held_out = hold_out(chats, 100, seed=0)
    assert (len(chats), len(held_out.train), len(held_out.validation)) == (2025, 798, 100)
    assert held_out.num_duplicates == 2025 - 898
    sides = [{question_of(chats[i]) for i in rows} for rows in (held_out.train, held_out.validation)]
    assert not sides[0] & sides[1]


def test_what_is_held_out_depends_on_the_seed_alone_and_keeps_a_question_together() -> None:
    chats = chats_of("a", "b", "A ", "c", "b", "d", "e", "f", "g")  # b is there twice, A asks what a asks
    first = hold_out(chats, 3, seed=1)
    assert first == hold_out(chats, 3, seed=1) and first.num_duplicates == 1
    assert sorted(first.train + first.validation) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert len(first.validation) == 3
    assert any(hold_out(chats, 3, seed=seed).validation != first.validation for seed in range(2, 6))
    for seed in range(8):
        validation = hold_out(chats, 3, seed).validation
        assert (0 in validation) == (2 in validation)
    with pytest.raises(DatasetError, match="leaves nothing to train on: there are 8 different"):
        hold_out(chats, 8, seed=0)
    assert hold_out(chats, 0, seed=0).validation == []


def test_a_validation_split_of_its_own_takes_its_questions_out_of_the_training() -> None:
    held_out = hold_out(chats_of("a", "b", "c"), 2, 0, Chats([{"messages": WANTED}], "own", None, None))
    assert held_out.train == [0, 1, 2] and held_out.validation == [0] and held_out.num_overlapping == 0
    same = Chats([{"messages": chats_of("B")[0]}], "own", None, None)
    held_out = hold_out(chats_of("a", "b", "c"), 2, 0, same)
    assert held_out.train == [0, 2] and held_out.num_overlapping == 1
