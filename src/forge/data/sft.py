"""[1] A conversation as tokens, and which of them the assistant writes: those are to be learnt."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from forge.data.chats import Conversation
from forge.data.tokenizer import render_chat
from forge.data_models import TextTrainBatch
from forge.errors import AssetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Targets = Literal["all", "last"]
"""Which turns of the assistant are learnt."""

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]  # characters of the rendered text, the end not included


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """A rendered conversation of T tokens."""

    token_ids: Tensor  # [T] int64
    is_target: Tensor  # [T] bool: written by the assistant, the token that ends its turn included
    name: str = ""  # for messages about it
    is_cut: bool = False  # whether more tokens followed

    @property
    def num_targets(self) -> int:
        """Tokens to learn; the first token of a text is predicted by none."""
        return int(self.is_target[1:].sum())

    def cut(self, seq_len: int) -> "ChatTokens":
        """The first `seq_len` tokens."""
        is_cut = len(self.token_ids) > seq_len
        return ChatTokens(self.token_ids[:seq_len], self.is_target[:seq_len], self.name, is_cut)


def tokenize_chat(
    tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, targets: Targets = "all"
) -> ChatTokens:
    """The conversation as the chat template writes it, as a whole, and which tokens are the assistant's.

    The template's own {% generation %} blocks say where the assistant speaks. Without them a turn is what the
    template adds to the text that ends where the assistant begins to answer, up to the token that ends the
    turn. That works as long as the text before a turn and with it stay the same when more turns follow;
    raises AssetError where they don't, and for a template that ends no turn.
    """
    if not tokenizer.is_fast:
        raise AssetError(
            f"the tokenizer of {tokenizer.name_or_path} can't say which characters a token stands for: SFT "
            "needs a fast one (tokenizer.json)"
        )
    answers = [i for i, message in enumerate(conversation) if message["role"] == "assistant"]
    conversation = conversation[: answers[-1] + 1]  # what stands behind it is learnt by none
    wanted = answers[-1:] if targets == "last" else answers
    text = render_chat(tokenizer, conversation)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    token_ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    if _GENERATION_BLOCK.search(tokenizer.get_chat_template()):
        turns = _blocks(tokenizer, conversation)
        if targets == "last":
            start = _start_of(tokenizer, conversation, text, wanted[0])
            turns = [turn for turn in turns if offsets[turn.start][0] >= start]
    else:
        spans = _spans(tokenizer, conversation, text, wanted)
        turns = [_tokens_of(span, offsets) for span in spans]
    is_target = torch.zeros(len(token_ids), dtype=torch.bool)
    end_ids = _special_ids(tokenizer)
    for turn in filter(len, turns):
        is_target[turn.start : _end_of_turn(tokenizer, token_ids, turn, end_ids)] = True
    return ChatTokens(torch.tensor(token_ids), is_target)


def collate_chats(examples: Sequence[ChatTokens]) -> TextTrainBatch:
    """Conversations as the rows of a batch, right-padded to the longest."""
    length = max(len(example.token_ids) for example in examples) - 1
    input_ids = torch.zeros(len(examples), length, dtype=torch.long)
    target_ids, target_mask = torch.zeros_like(input_ids), torch.zeros_like(input_ids, dtype=torch.bool)
    for row, example in enumerate(examples):
        size = len(example.token_ids) - 1
        input_ids[row, :size] = example.token_ids[:-1]
        target_ids[row, :size] = example.token_ids[1:]
        target_mask[row, :size] = example.is_target[1:]
    names = [example.name for example in examples]
    return TextTrainBatch(input_ids, target_ids, target_mask, target_mask.float(), names)


def _blocks(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation) -> list[range]:
    """The tokens of each {% generation %} block."""
    encoded = tokenizer.apply_chat_template(
        conversation,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return _runs([bool(flag) for flag in encoded["assistant_masks"]])  # pyright: ignore


def _start_of(
    tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, text: str, number: int
) -> int:
    """Where this message begins in the rendered conversation."""
    before = render_chat(tokenizer, conversation[:number])
    if not text.startswith(before):
        raise _rewritten(tokenizer, number - 1, len(conversation))
    return len(before)


def _spans(
    tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, text: str, wanted: Iterable[int]
) -> list[Span]:
    """Where the turns of these numbers stand in the rendered conversation, found by rendering its parts."""
    spans = []
    for i in wanted:
        before = render_chat(tokenizer, conversation[:i], add_generation_prompt=True)
        is_last = i + 1 == len(conversation)
        through = text if is_last else render_chat(tokenizer, conversation[: i + 1])
        if not text.startswith(before) or not text.startswith(through) or len(through) <= len(before):
            raise _rewritten(tokenizer, i, len(conversation))
        spans.append((len(before), len(through)))
    return spans


def _rewritten(tokenizer: "PreTrainedTokenizerBase", number: int, count: int) -> AssetError:
    return AssetError(
        f"the chat template of {tokenizer.name_or_path} writes message {number} of {count} otherwise when "
        "more messages follow (as templates do that drop earlier reasoning), so its tokens are not those "
        "that would be generated: set dataset.targets to last to learn the last answer of each conversation "
        "only, or give the template {% generation %} blocks"
    )


def _tokens_of(span: Span, offsets: Sequence[Span]) -> range:
    """The tokens that begin within the span: one that begins before it is not the assistant's alone."""
    start, stop = span
    inside = [i for i, (a, _) in enumerate(offsets) if start <= a < stop]
    return range(inside[0], inside[-1] + 1) if inside else range(0)


def _end_of_turn(
    tokenizer: "PreTrainedTokenizerBase", token_ids: list[int], turn: range, end_ids: set[int]
) -> int:
    """Where the turn's targets end: behind its last special token, or the next one behind it, up to which the
    model must write all. What stands between that token and the end of the turn should be white space only:
    an answer may hold a special token, too."""
    found: list[tuple[list[int], int]] = []  # what stands between; where the targets end
    for i in reversed(turn):
        if token_ids[i] in end_ids:
            found.append((token_ids[i + 1 : turn.stop], i + 1))
            break
    for i in range(turn.stop, len(token_ids)):
        if token_ids[i] in end_ids:
            found.append((token_ids[turn.stop : i], i + 1))
            break
    if found:
        _, end = min(found, key=lambda place: bool(str(tokenizer.decode(place[0])).strip()))
        return end
    raise AssetError(
        f"the chat template of {tokenizer.name_or_path} ends an assistant's turn with no special token "
        f"({tokenizer.decode(token_ids[turn.start : turn.stop][-12:])!r}), so a model trained with it would "
        "never stop: use a template that does"
    )


def _special_ids(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def _runs(flags: Sequence[bool]) -> list[range]:
    """The ranges in which all flags are set.

    >>> _runs([False, True, True, False, True])
    [range(1, 3), range(4, 5)]
    """
    edges = [i for i, (a, b) in enumerate(pairwise([False, *flags, False])) if a != b]
    return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
