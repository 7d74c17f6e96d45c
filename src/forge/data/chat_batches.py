"""[1] Batches of conversations to learn, decided by the seed and a position alone, shared out to ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from forge.data.chats import Chats, Conversation
from forge.data.rows import EndlessRows, IndexedRows, Position, Row
from forge.data.sft import ChatTokens, Targets, collate_chats, tokenize_chat
from forge.data_models import TextTrainBatch
from forge.errors import DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ChatBatch:
    """Conversations of one optimizer step."""

    inputs: list[TextTrainBatch]  # one for each data-parallel rank
    after: Position  # where the next batch begins
    num_tokens: int
    num_targets: int  # tokens to learn
    num_cut: int  # conversations of which only the first `seq_len` tokens are there
    num_dropped: int  # conversations passed over: no answer begins within `seq_len` tokens


@dataclass(frozen=True, slots=True)
class ChatRenderer:
    """How a conversation becomes tokens."""

    tokenizer: "PreTrainedTokenizerBase"
    seq_len: int
    system_prompt: str | None = None  # for conversations without one; None: the chat template decides
    targets: Targets = "all"

    def messages(self, conversation: Conversation) -> Conversation:
        """The conversation with the system prompt in front, where it has none of its own."""
        if self.system_prompt is None or conversation[0]["role"] == "system":
            return conversation
        return [{"role": "system", "content": self.system_prompt}, *conversation]

    def example(self, chats: Chats, row: int) -> ChatTokens:
        """The conversation of a row, cut to `seq_len` tokens and named by its row."""
        tokens = tokenize_chat(self.tokenizer, self.messages(chats[row]), self.targets)
        return replace(tokens.cut(self.seq_len), name=f"row {row}")


class ChatBatches:
    """`batch_size` conversations at a time out of some rows, reshuffled each epoch.

    A batch depends on nothing but the seed and the position it starts at: whoever goes on from a position
    that was saved gets what would have come.
    """

    def __init__(
        self,
        chats: Chats,
        rows: Sequence[int],
        renderer: ChatRenderer,
        *,
        batch_size: int,
        num_ranks: int = 1,
        seed: int = 0,
    ) -> None:
        self._chats = chats
        self._source = IndexedRows(_Rows(rows), seed)
        self._reader = EndlessRows(self._source)
        self._renderer = renderer
        self._batch_size = batch_size
        self._num_ranks = num_ranks
        self._num_rows = len(rows)

    def batch(self, start: Position) -> ChatBatch:
        """The conversations from a position on. Raises DatasetError for a row that is no conversation, and
        when a whole epoch brings nothing to learn."""
        if self._reader.position != start:
            self._reader = EndlessRows(self._source, start)
        examples: list[ChatTokens] = []
        num_read = num_cut = 0
        while len(examples) < self._batch_size:
            example = self._renderer.example(self._chats, next(self._reader)["row"])
            num_read += 1
            if example.num_targets:
                examples.append(example)
                num_cut += example.is_cut
            elif not examples and num_read >= self._num_rows:
                raise DatasetError(
                    f"none of {self._num_rows} conversations has an answer that begins within "
                    f"training.seq_len {self._renderer.seq_len} tokens: raise it"
                )
        return ChatBatch(
            inputs=share_out(examples, self._num_ranks),
            after=self._reader.position,
            num_tokens=sum(len(example.token_ids) for example in examples),
            num_targets=sum(example.num_targets for example in examples),
            num_cut=num_cut,
            num_dropped=num_read - len(examples),
        )


def in_order(
    chats: Chats, rows: Sequence[int], renderer: ChatRenderer, *, batch_size: int, num_ranks: int = 1
) -> list[list[TextTrainBatch]]:
    """All conversations once, in batches of `batch_size` or somewhat more, each shared out to the ranks.

    Those without an answer within `seq_len` tokens are left out. Raises DatasetError where some but not all
    ranks would have one.
    """
    examples = [renderer.example(chats, row) for row in rows]
    examples = [example for example in examples if example.num_targets]
    if 0 < len(examples) < num_ranks:
        raise DatasetError(
            f"{len(examples)} conversations to validate on are less than one for each of {num_ranks} "
            "data-parallel ranks: raise validation.size, or set it to 0"
        )
    num_batches = max(1, len(examples) // batch_size) if examples else 0
    bounds = [i * len(examples) // num_batches for i in range(num_batches)] + [len(examples)]
    return [share_out(examples[start:stop], num_ranks) for start, stop in pairwise(bounds)]


def share_out(examples: Sequence[ChatTokens], num_ranks: int) -> list[TextTrainBatch]:
    """The conversations, at least one for each rank, as one batch a rank, of about as many tokens each: the
    longest first, each to the rank with the fewest so far."""
    assert len(examples) >= num_ranks, f"{len(examples)} conversations for {num_ranks} ranks"
    shares: list[list[ChatTokens]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for example in sorted(examples, key=lambda e: -len(e.token_ids)):
        rank = loads.index(min(loads))
        shares[rank].append(example)
        loads[rank] += len(example.token_ids)
    return [collate_chats(share) for share in shares]


class _Rows:
    """The numbers of some rows as a table."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        return {"row": self._rows[number]}
