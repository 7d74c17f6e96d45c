"""Where rows come from: files in the shape of GSM8K, folders, tasks; and what goes wrong."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from forge.data.rows import EndlessRows, Position, RowSource
from forge.data.sources import open_source
from forge.errors import DatasetError

CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets_cache"))


def gsm8k_rows(count: int) -> list[dict[str, str]]:
    return [
        {
            "question": f"Tom has {n} eggs and finds one. How many?",
            "answer": f"{n}+1=<<{n}+1={n + 1}>>\n#### {n + 1}",
        }
        for n in range(count)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    Dataset.from_list(rows).to_parquet(path)
    return path


def epoch(source: RowSource, number: int = 0, skip: int = 0) -> list[str]:
    return [row["question"] for row in source.rows(Position(number, skip))]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("suffix", "write"), [("jsonl", write_jsonl), ("json", write_jsonl), ("parquet", write_parquet)]
)
def test_a_local_file_gives_all_its_rows(
    tmp_path: Path, suffix: str, write: Callable[[Path, list[dict[str, Any]]], Path], streaming: bool
) -> None:
    rows = gsm8k_rows(30)
    source = open_source(str(write(tmp_path / f"data.{suffix}", rows)), streaming=streaming)
    got = list(source.rows(Position()))
    assert sorted(row["question"] for row in got) == sorted(row["question"] for row in rows)
    assert {row["question"]: row["answer"] for row in got} == {row["question"]: row["answer"] for row in rows}
    assert source.num_rows == (None if streaming else 30)


def test_a_slice_of_a_file_can_be_asked_for(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "data.jsonl", gsm8k_rows(30))
    assert open_source(str(file), split="test[:5]").num_rows == 5


@pytest.mark.parametrize("streaming", [False, True])
def test_a_local_folder_gives_its_splits(tmp_path: Path, streaming: bool) -> None:
    write_jsonl(tmp_path / "train.jsonl", gsm8k_rows(9))
    write_jsonl(tmp_path / "test.jsonl", gsm8k_rows(4))
    for split, count in [("train", 9), ("test", 4)]:
        assert len(epoch(open_source(str(tmp_path), split=split, streaming=streaming))) == count


@pytest.mark.parametrize("streaming", [False, True])
def test_epochs_differ_and_each_can_be_entered_in_the_middle(tmp_path: Path, streaming: bool) -> None:
    file = write_jsonl(tmp_path / "data.jsonl", gsm8k_rows(40))

    def reopened(seed: int = 5) -> RowSource:
        return open_source(str(file), streaming=streaming, seed=seed)

    first, second = epoch(reopened(), 0), epoch(reopened(), 1)
    assert first != second and sorted(first) == sorted(second)
    assert epoch(reopened(seed=6), 0) != first
    assert epoch(reopened(), 1, skip=13) == second[13:]
    endless = EndlessRows(reopened())
    assert [next(endless)["question"] for _ in range(80)] == first + second


def test_a_task_is_made_from_the_seed_and_its_options() -> None:
    def questions(seed: int, split: str = "train") -> list[str]:
        return epoch(
            open_source("reasoning_gym/chain_sum", options={**CHAIN_SUM, "size": 60}, seed=seed, split=split)
        )

    assert questions(0) == questions(0)
    assert len(questions(0)) == 60
    # Two terms below 10 make 200 questions; 60 of them drawn twice share far less than all.
    assert len(set(questions(0)) & set(questions(1))) < 45
    assert len(set(questions(0)) & set(questions(0, "test"))) < 45


def test_task_rows_hold_right_sums_and_the_metadata() -> None:
    for row in islice(open_source("reasoning_gym/chain_sum", options=CHAIN_SUM).rows(Position()), 50):
        left, sign, right = row["expression"].split()
        assert int(row["answer"]) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
        assert row["expression"] in row["question"]


def test_a_task_has_2000_rows_unless_told_otherwise() -> None:
    assert open_source("reasoning_gym/chain_sum").num_rows == 2000


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("nowhere/data.jsonl", {}, "no dataset file at nowhere/data.jsonl"),
        ("./nowhere", {}, "no dataset file at ./nowhere"),
        ("reasoning_gym/chainsum", {}, "no task 'chainsum' (did you mean 'chain_sum'?)"),
        (
            "reasoning_gym/chain_sum",
            {"options": {"min_term": 2}},
            "no option 'min_term' (did you mean 'min_terms'?); it has ['min_terms'",
        ),
        (
            "reasoning_gym/chain_sum",
            {"options": {"min_terms": 5, "max_terms": 2}},
            "max_terms must be >= min_terms",
        ),
        ("reasoning_gym/chain_sum", {"options": {"size": 0}}, "size must be positive"),
        ("reasoning_gym/chain_sum", {"options": {"size": "many"}}, "don't suit"),
        ("nowhere/data.jsonl", {"options": {"min_terms": 2}}, "options are for reasoning_gym"),
    ],
)
def test_a_wrong_name_or_option_is_one_clear_line(path: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError) as caught:
        open_source(path, **arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("content", "message"), [("", "is empty"), ('{"question": "a"}\n{oops\n', "can't load")]
)
def test_an_empty_or_broken_file_is_one_clear_line(
    tmp_path: Path, content: str, message: str, streaming: bool
) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(DatasetError, match=message) as caught:
        open_source(str(tmp_path / "data.jsonl"), streaming=streaming)
    assert "\n" not in str(caught.value)


def test_an_empty_parquet_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "data.parquet", gsm8k_rows(1))
    Dataset.from_parquet(str(file)).select([]).to_parquet(file)
    with pytest.raises(DatasetError, match="no data"):
        open_source(str(file))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DatasetError, match="can't load the dataset"):
        open_source(str(tmp_path / "nothing"))


def test_an_unknown_split_is_refused_with_those_there_are(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", gsm8k_rows(3))
    with pytest.raises(DatasetError, match=r"validation.*train"):
        open_source(str(tmp_path), split="validation")


def test_a_text_file_is_refused_with_the_endings_that_work(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("a,b\n")
    with pytest.raises(DatasetError, match=r"must end in one of .*\.jsonl"):
        open_source(str(tmp_path / "data.csv"))
