"""The questions that the generator is asked at a validation."""

import json
from pathlib import Path

import pytest

from forge.data.chat_dataset import ChatDataset

SEQ_LEN = 64


@pytest.fixture
def dataset(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChatDataset:
    """20 conversations, all of them to validate on in turn; the question of each fourth is too long."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    questions = [f"{n} " * (SEQ_LEN if n % 4 == 0 else 1) for n in range(20)]
    data = tmp_path / "chats.jsonl"
    with data.open("w") as file:
        for question in questions:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    dataset = ChatDataset(
        str(data), tokenizer=str(tiny_llama), seq_len=SEQ_LEN, batch_size=2, validation_size=16
    )
    dataset._load()
    return dataset


@pytest.mark.parametrize("count", [0, 1, 4, 100])
def test_questions_are_different_and_leave_room_for_an_answer(dataset: ChatDataset, count: int) -> None:
    questions = dataset._choose(count)
    fitting = sum(row % 4 != 0 for row in dataset._held_out.validation)
    assert len({question.prompt for question in questions}) == len(questions) == min(count, fitting)
    assert all(len(question.text) < SEQ_LEN and question.answer == "Yes" for question in questions)
    assert questions == dataset._choose(count)
