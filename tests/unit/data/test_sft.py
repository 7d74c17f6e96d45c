"""Which tokens of a rendered conversation are learnt, against expectations written by hand."""

from typing import TYPE_CHECKING

import pytest
import torch

from forge.data.sft import ChatTokens, Targets, _tokens_of, collate_chats, tokenize_chat
from forge.data.tokenizer import render_prompt
from forge.errors import AssetError
from tests.tiny import CHATML, make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SINGLE = [{"role": "user", "content": "Is it 3?"}, {"role": "assistant", "content": "No,\n it is 4."}]
MULTI = [
    {"role": "system", "content": "Be brief."},
    *SINGLE,
    {"role": "user", "content": "The answer is?"},
    {"role": "assistant", "content": "  4 🙂"},
]
BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCKS_WITHOUT_END = BLOCKS.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
# as Qwen3's does: the last answer is written with a place for its reasoning, earlier ones without
DROPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last and m['role'] == 'assistant' %}"
    "<think></think>{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> "PreTrainedTokenizerFast":
    return make_tokenizer()


def with_template(tokenizer: "PreTrainedTokenizerFast", template: str) -> "PreTrainedTokenizerFast":
    tokenizer.chat_template = template
    return tokenizer


def learnt(tokenizer: "PreTrainedTokenizerFast", tokens: ChatTokens) -> list[str]:
    """The texts of the runs of targets."""
    runs: list[list[int]] = [[]]
    for token, is_target in zip(tokens.token_ids.tolist(), tokens.is_target.tolist(), strict=True):
        if is_target:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("template", [CHATML, BLOCKS, BLOCKS_WITHOUT_END])
@pytest.mark.parametrize(
    ("conversation", "targets", "expected"),
    [
        (SINGLE, "all", ["No,\n it is 4.<|im_end|>"]),
        (MULTI, "all", ["No,\n it is 4.<|im_end|>", "  4 🙂<|im_end|>"]),
        (MULTI, "last", ["  4 🙂<|im_end|>"]),
        (MULTI[:-1], "all", ["No,\n it is 4.<|im_end|>"]),  # a question that nobody answered
        (MULTI[:-1], "last", ["No,\n it is 4.<|im_end|>"]),
    ],
)
def test_the_assistants_turns_with_the_token_that_ends_them(
    tokenizer: "PreTrainedTokenizerFast",
    template: str,
    conversation: list[dict[str, str]],
    targets: Targets,
    expected: list[str],
) -> None:
    tokens = tokenize_chat(with_template(tokenizer, template), conversation, targets)
    assert learnt(tokenizer, tokens) == expected


@pytest.mark.parametrize("template", [CHATML, BLOCKS])
def test_tokens_are_those_of_the_template_and_targets_follow_the_prompt_that_is_asked(
    tokenizer: "PreTrainedTokenizerFast", template: str
) -> None:
    with_template(tokenizer, template)
    tokens = tokenize_chat(tokenizer, SINGLE)
    whole = tokenizer.apply_chat_template(SINGLE, tokenize=True, return_dict=True)["input_ids"]
    assert tokens.token_ids.tolist() == whole
    first = int(tokens.is_target.nonzero()[0])
    prompt = render_prompt(tokenizer, SINGLE[0]["content"])
    assert whole[:first] == tokenizer(prompt, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("template", [CHATML, BLOCKS, BLOCKS_WITHOUT_END])
def test_a_special_token_inside_an_answer_does_not_end_it(
    tokenizer: "PreTrainedTokenizerFast", template: str
) -> None:
    answer = {"role": "assistant", "content": "It is <|im_start|> and then 4."}
    tokens = tokenize_chat(with_template(tokenizer, template), [SINGLE[0], answer, *SINGLE])
    assert learnt(tokenizer, tokens)[0] == "It is <|im_start|> and then 4.<|im_end|>"


def test_the_last_turn_is_all_its_blocks_and_never_those_of_another(
    tokenizer: "PreTrainedTokenizerFast",
) -> None:
    two_blocks = BLOCKS.replace(
        "{% generation %}", "{% generation %}think<|im_end|>{% endgeneration %} {% generation %}"
    )
    tokens = tokenize_chat(with_template(tokenizer, two_blocks), MULTI, "last")
    assert learnt(tokenizer, tokens) == ["think<|im_end|>", "  4 🙂<|im_end|>"]
    silent = [*MULTI[:-1], {"role": "assistant", "content": ""}]
    tokens = tokenize_chat(with_template(tokenizer, BLOCKS_WITHOUT_END), silent, "last")
    assert learnt(tokenizer, tokens) == []


def test_a_token_that_begins_before_a_turn_is_not_learnt() -> None:
    offsets = [(0, 3), (3, 5), (5, 9), (9, 9)]
    assert _tokens_of((4, 9), offsets) == range(2, 3)
    assert not _tokens_of((6, 8), offsets)


def test_a_tokenizer_may_have_several_templates(tokenizer: "PreTrainedTokenizerFast") -> None:
    tokenizer.chat_template = {"default": BLOCKS, "rag": CHATML}  # pyright: ignore[reportAttributeAccessIssue]
    assert learnt(tokenizer, tokenize_chat(tokenizer, SINGLE)) == ["No,\n it is 4.<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_only_the_last_is_learnt(
    tokenizer: "PreTrainedTokenizerFast",
) -> None:
    with_template(tokenizer, DROPS_REASONING)
    with pytest.raises(AssetError, match="writes message 2 of 5 otherwise when more messages follow"):
        tokenize_chat(tokenizer, MULTI)
    assert learnt(tokenizer, tokenize_chat(tokenizer, MULTI, "last")) == ["<think></think>  4 🙂<|im_end|>"]
    assert learnt(tokenizer, tokenize_chat(tokenizer, SINGLE)) == ["<think></think>No,\n it is 4.<|im_end|>"]


def test_a_template_that_ends_no_turn_is_refused(tokenizer: "PreTrainedTokenizerFast") -> None:
    endless = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    with pytest.raises(AssetError, match="would never stop"):
        tokenize_chat(with_template(tokenizer, endless), SINGLE)


def test_a_batch_predicts_each_token_from_those_before_it() -> None:
    long = ChatTokens(torch.tensor([5, 6, 7, 8]), torch.tensor([False, False, True, True]))
    short = ChatTokens(torch.tensor([1, 2]), torch.tensor([True, True]))
    assert (long.num_targets, short.num_targets) == (2, 1)
    batch = collate_chats([long, short])
    assert batch.input_ids.tolist() == [[5, 6, 7], [1, 0, 0]]
    assert batch.target_ids.tolist() == [[6, 7, 8], [2, 0, 0]]
    assert batch.target_mask.tolist() == [[False, True, True], [True, False, False]]
    assert batch.target_weights.tolist() == [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    assert long.cut(3).num_targets == 1 and long.cut(2).num_targets == 0
