"""DatasetActor: what it hands out, and what it refuses at the start."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from forge.data.dataset import DatasetActor, DatasetInfo
from forge.data.questions import final_answer
from forge.data_models import Sample
from forge.errors import AssetError, ConfigError, DatasetError

GSM8K = [
    (
        "A robe takes 2 bolts and half that of white. How many?",
        "2/2=<<2/2=1>>1\nSo 2+1=<<2+1=3>>3\n#### 3",
        "3",
    ),
    ("What is the price of the house?", "He sold it for $70,000\n#### 70,000", "70000"),
    ("How cold is it?", "#### -12", "-12"),
    ("How many are left?", "7", "7"),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets_cache"))


@pytest.fixture
def gsm8k(tmp_path: Path) -> str:
    return write(tmp_path, [{"question": question, "answer": answer} for question, answer, _ in GSM8K])


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def started(path: str, tokenizer: Path, **arguments: Any) -> DatasetActor:
    actor = DatasetActor(path, tokenizer=str(tokenizer), **arguments)
    asyncio.run(actor.setup())
    return actor


def samples(actor: DatasetActor, count: int) -> list[Sample]:
    async def ask() -> list[Sample]:
        return [await actor.sample() for _ in range(count)]

    return asyncio.run(ask())


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_become_prompts_with_targets(gsm8k: str, tiny_llama: Path, streaming: bool) -> None:
    got = samples(started(gsm8k, tiny_llama, streaming=streaming, system_prompt="Be brief."), 4)
    head, tail = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
    )
    wanted = {f"{head}{question}{tail}": target for question, _, target in GSM8K}
    assert {sample["request"]: sample["target"] for sample in got} == wanted
    assert {sample.get("question") for sample in got} == {question for question, _, _ in GSM8K}


def test_concurrent_calls_each_get_their_own_row(tiny_llama: Path, tmp_path: Path) -> None:
    path = write(tmp_path, [{"question": f"number {n}", "answer": n} for n in range(100)])
    actor = started(path, tiny_llama)

    async def ask(count: int) -> list[Sample]:
        return await asyncio.gather(*(actor.sample() for _ in range(count)))

    assert sorted(int(sample["target"]) for sample in asyncio.run(ask(100))) == list(range(100))
    assert sorted(int(sample["target"]) for sample in asyncio.run(ask(100))) == list(range(100))
    assert asyncio.run(actor.info()) == DatasetInfo(num_rows=100, next_number=200)


def test_the_start_takes_no_row_away(gsm8k: str, tiny_llama: Path) -> None:
    assert asyncio.run(started(gsm8k, tiny_llama).info()) == DatasetInfo(num_rows=4, next_number=0)


def test_the_seed_decides_the_order(tiny_llama: Path, tmp_path: Path) -> None:
    path = write(tmp_path, [{"question": f"number {n}", "answer": n} for n in range(30)])
    first, same, other = (samples(started(path, tiny_llama, seed=seed), 45) for seed in (1, 1, 2))
    assert first == same != other


@pytest.mark.parametrize("streaming", [False, True])
def test_a_number_stands_for_one_question_whenever_it_is_asked(
    tiny_llama: Path, tmp_path: Path, streaming: bool
) -> None:
    """Against an actor that is asked without numbers; in any order, over the ends of epochs, and again."""
    path = write(tmp_path, [{"question": f"number {n}", "answer": n} for n in range(30)])
    wanted = samples(started(path, tiny_llama, streaming=streaming), 100)
    numbers = random.Random(0).sample(range(100), 100)

    async def ask(actor: DatasetActor) -> None:
        assert await asyncio.gather(*map(actor.sample, numbers)) == [wanted[number] for number in numbers]
        assert [await actor.sample(number) for number in (99, 0, 64)] == [wanted[i] for i in (99, 0, 64)]
        assert await actor.sample() == wanted[0]  # its own count goes on as if nobody had asked by number

    asyncio.run(ask(started(path, tiny_llama, streaming=streaming)))
    with pytest.raises(DatasetError, match="numbered from 0, got number -1"):
        asyncio.run(started(path, tiny_llama).sample(-1))


@pytest.mark.parametrize("streaming", [False, True])
def test_another_actor_goes_on_from_a_state(tiny_llama: Path, tmp_path: Path, streaming: bool) -> None:
    path = write(tmp_path, [{"question": f"number {n}", "answer": n} for n in range(30)])
    first = started(path, tiny_llama, streaming=streaming)
    wanted = samples(first, 150)
    early = started(path, tiny_llama, streaming=streaming)
    samples(early, 71)
    second = started(path, tiny_llama, streaming=streaming)
    asyncio.run(second.load_state_dict(asyncio.run(early.state_dict())))
    assert samples(second, 79) == wanted[71:]
    assert asyncio.run(second.state_dict()) == asyncio.run(first.state_dict())


def test_a_state_of_other_data_is_refused(gsm8k: str, tiny_llama: Path) -> None:
    with pytest.raises(DatasetError, match="has 4 rows, and 5 when the state was saved"):
        asyncio.run(started(gsm8k, tiny_llama).load_state_dict({"number": 3, "epoch_length": 5}))


def test_a_task_is_served_with_any_of_its_columns(tiny_llama: Path) -> None:
    actor = started(
        "reasoning_gym/chain_sum",
        tiny_llama,
        prompt_column="expression",
        options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    )
    for sample in samples(actor, 50):
        expression = sample["request"].removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
        left, sign, right = expression.split()
        assert int(sample["target"]) == (int(left) + int(right) if sign == "+" else int(left) - int(right))


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        ("reasons\n#### 18", "18"),
        ("#### 1,234,567", "1234567"),
        ("a #### 1\nb #### 2 ", "2"),
        (" 18 ", "18"),
        ("red, green", "red, green"),  # commas belong to an answer that is not marked
        ("#### ", ""),
    ],
)
def test_the_final_answer_follows_the_last_mark(answer: str, target: str) -> None:
    assert final_answer(answer) == target


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("column", ["prompt_column", "target_column"])
def test_a_missing_column_is_refused_with_those_there_are(
    gsm8k: str, tiny_llama: Path, streaming: bool, column: str
) -> None:
    with pytest.raises(
        DatasetError, match=r"no column 'problem': its columns are \['answer', 'question'\]"
    ) as caught:
        started(gsm8k, tiny_llama, streaming=streaming, **{column: "problem"})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": ["a", "b"], "answer": "1"}, "column 'question' must be text"),
        ({"question": " ", "answer": "1"}, "column 'question' must be text"),
        ({"question": "a", "answer": None}, "column 'answer' must be text or a number, got None"),
        ({"question": "a", "answer": [1]}, "column 'answer' must be text or a number"),
        ({"question": "a", "answer": "reasons #### "}, "column 'answer' must be text or a number"),
    ],
)
def test_a_row_that_can_not_be_asked_is_refused(
    tiny_llama: Path, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        started(write(tmp_path, [row]), tiny_llama)
    assert "question 0 in the order of its seed" in str(caught.value) and "\n" not in str(caught.value)


def test_a_bad_row_further_on_is_raised_when_its_turn_comes(tiny_llama: Path, tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": str(n)} for n in range(20)] + [{"question": "a", "answer": None}]
    actor = started(write(tmp_path, rows), tiny_llama, seed=1)
    with pytest.raises(DatasetError, match="got None"):
        samples(actor, 21)


@pytest.mark.parametrize(
    ("path", "error"),
    [("nowhere/data.jsonl", DatasetError), ("reasoning_gym/chain_summ", DatasetError)],
)
def test_what_is_wrong_with_the_data_shows_at_the_start(
    tiny_llama: Path, path: str, error: type[ConfigError]
) -> None:
    with pytest.raises(error):
        started(path, tiny_llama)


def test_an_empty_dataset_shows_at_the_start(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="is empty"):
        started(write(tmp_path, []), tiny_llama)


def test_a_model_folder_without_a_tokenizer_shows_at_the_start(gsm8k: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(AssetError, match="tokenizer"):
        started(gsm8k, tmp_path / "model")
