"""Batches of conversations: what comes when, how much of it, and for which rank."""

import pytest
import torch

from forge.data.chat_batches import ChatBatches, ChatRenderer, in_order, share_out
from forge.data.chats import Chats
from forge.data.rows import Position
from forge.data.sft import ChatTokens
from forge.data_models import TextTrainBatch
from forge.errors import DatasetError
from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()


def chats_of(*answers: str) -> Chats:
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    return Chats(rows, "data", None, None)


def batches_of(chats: Chats, batch_size: int, seq_len: int = 64, **settings: int) -> ChatBatches:
    renderer = ChatRenderer(TOKENIZER, seq_len)
    return ChatBatches(chats, range(len(chats)), renderer, batch_size=batch_size, **settings)


def answers_in(parts: list[TextTrainBatch]) -> list[str]:
    """What is to be learnt of each row."""
    return [
        TOKENIZER.decode(ids[mask]).removesuffix("<|im_end|>")
        for part in parts
        for ids, mask in zip(part.target_ids, part.target_mask, strict=True)
    ]


def read(batches: ChatBatches, position: Position, count: int) -> tuple[list[list[str]], Position]:
    read = []
    for _ in range(count):
        batch = batches.batch(position)
        read.append(sorted(answers_in(batch.inputs)))
        position = batch.after
    return read, position


def test_an_epoch_brings_every_conversation_once_and_any_place_can_be_entered() -> None:
    chats = chats_of(*map(str, range(10)))
    whole, _ = read(batches_of(chats, 4), Position(), 10)  # four epochs
    flat = [answer for batch in whole for answer in batch]
    for answer in map(str, range(10)):
        assert flat.count(answer) == 4
    assert sorted(whole[0] + whole[1]) != sorted(whole[5] + whole[6])
    _, place = read(batches_of(chats, 4), Position(), 6)
    assert place == Position(2, 4)
    assert read(batches_of(chats, 4), place, 4)[0] == whole[6:]  # a new process
    assert read(batches_of(chats, 4, seed=1), Position(), 1)[0] != whole[:1]
    again = batches_of(chats, 4)
    assert read(again, place, 1) == read(again, place, 1)  # a call that is repeated


def test_what_is_cut_and_what_is_dropped_is_counted() -> None:
    prompt = len(TOKENIZER("<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    chats = chats_of("1", "1 2 3 4 5 6 7 8 9")
    batch = batches_of(chats, 2, seq_len=prompt + 4).batch(Position())
    assert (batch.num_cut, batch.num_dropped) == (1, 0)
    assert max(part.input_ids.shape[1] for part in batch.inputs) == prompt + 3
    assert batch.num_targets == sum(int(part.target_mask.sum()) for part in batch.inputs)
    assert sorted(name for part in batch.inputs for name in part.episode_ids) == ["row 0", "row 1"]
    long = Chats(
        [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "yes"}]}
            for q in ("?", "1 2 3 4 5 6 7 8 9")
        ],
        "data",
        None,
        None,
    )
    batch = batches_of(long, 2, seq_len=prompt + 4).batch(Position())
    assert answers_in(batch.inputs) == ["yes", "yes"]  # the same one, of two epochs
    assert batch.num_dropped >= 1
    with pytest.raises(DatasetError, match=f"none of 2 conversations .* training.seq_len {prompt}"):
        batches_of(long, 2, seq_len=prompt).batch(Position())


def test_ranks_get_about_as_many_tokens_each_and_all_of_the_batch() -> None:
    sizes = [100, 60, 50, 40, 30, 10, 10]
    examples = [ChatTokens(torch.full((n,), n), torch.ones(n, dtype=torch.bool)) for n in sizes]
    parts = share_out(examples, 3)
    loads = [int(part.target_mask.sum()) + len(part.target_mask) for part in parts]
    assert sorted(loads) == [100, 100, 100]
    assert sorted(int(ids[0]) for part in parts for ids in part.input_ids) == sorted(sizes)


def test_the_validation_is_every_conversation_in_order_and_leaves_no_rank_without_one() -> None:
    chats = chats_of(*map(str, range(7)))
    renderer = ChatRenderer(TOKENIZER, 64)
    batches = in_order(chats, [1, 3, 4, 6, 0], renderer, batch_size=2, num_ranks=2)
    assert [sorted(answers_in(batch)) for batch in batches] == [["1", "3"], ["0", "4", "6"]]
    assert all(len(part.target_mask) for batch in batches for part in batch)
    assert in_order(chats, [], renderer, batch_size=2, num_ranks=2) == []
    with pytest.raises(DatasetError, match="1 conversations to validate on .* each of 2 data-parallel ranks"):
        in_order(chats, [3], renderer, batch_size=2, num_ranks=2)


def test_a_system_prompt_goes_before_conversations_without_one() -> None:
    renderer = ChatRenderer(TOKENIZER, 64, system_prompt="Be brief.")
    text = TOKENIZER.decode(renderer.example(chats_of("yes"), 0).token_ids)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    own = [{"role": "system", "content": "Sing."}, *chats_of("yes")[0]]
    assert renderer.messages(own) == own
