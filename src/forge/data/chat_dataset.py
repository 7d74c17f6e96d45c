"""[1] ChatDataset hands out batches of conversations to learn, and those that are held out."""

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from forge.controller import ForgeActor, endpoint
from forge.data.chat_batches import ChatBatch, ChatBatches, ChatRenderer, in_order
from forge.data.chats import hold_out, open_chats
from forge.data.rows import Position
from forge.data.sft import Targets
from forge.data.tokenizer import load_tokenizer, render_chat
from forge.data_models import TextTrainBatch
from forge.errors import ConfigError
from forge.observability import record


@dataclass(frozen=True, slots=True)
class ChatSizes:
    """How many conversations there are."""

    train: int  # of one epoch
    validation: int
    duplicates: int  # left out, since an earlier one is the same word for word
    overlapping: int = 0  # left out, since a question of the validation's own split is theirs, too

    def __str__(self) -> str:
        return (
            f"{self.train} conversations to train on, {self.validation} to validate on; left out: "
            f"{self.duplicates} that are there twice, {self.overlapping} with a question of the validation"
        )


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt out of the held-out conversations, and what was answered there."""

    prompt: str  # rendered by the chat template, up to where the assistant begins
    text: str  # the user's own words
    answer: str


class ChatDataset(ForgeActor):
    """Serves conversations as batches of tokens for SFT; what it is asked for says all, it keeps no state.

    path, name, split, prompt_column, answer_column: see `open_chats`;
    system_prompt: put before conversations that have none; None leaves it to the chat template;
    targets: which turns of the assistant are learnt, "all" or the "last" of each conversation;
    validation_size, validation_split: see `hold_out`; without a split they are taken out of the data;
    tokenizer: the model (its folder, or anything `fetch` takes) whose chat template writes the conversations;
    seq_len: tokens of a conversation, at most; batch_size: conversations of a batch, over all ranks;
    num_ranks: data-parallel ranks of the trainer, which share every batch.

    Wrong arguments and a row that is no conversation raise DatasetError or AssetError when the actor starts.
    """

    recovers: ClassVar[bool] = True

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str = "train",
        prompt_column: str | None = None,
        answer_column: str | None = None,
        system_prompt: str | None = None,
        targets: Targets = "all",
        *,
        tokenizer: str,
        seq_len: int,
        batch_size: int,
        num_ranks: int = 1,
        validation_size: int = 0,
        validation_split: str | None = None,
        seed: int = 0,
    ) -> None:
        if batch_size < num_ranks:
            raise ConfigError(
                f"batch_size {batch_size} gives {num_ranks} data-parallel ranks less than a conversation each"
            )
        columns = {"prompt_column": prompt_column, "answer_column": answer_column}
        self._source = {"path": path, "name": name, **columns, "needs_last_answer": targets == "last"}
        self._splits = (split, validation_split)
        self._validation_size = validation_size
        self._system_prompt = system_prompt
        self._targets: Targets = targets
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._shape = {"batch_size": batch_size, "num_ranks": num_ranks}
        self._seed = seed
        self._ahead: tuple[Position, asyncio.Task[ChatBatch]] | None = None  # what comes next

    async def setup(self) -> None:
        """Reads all conversations and makes one batch: what is wrong shows before training starts."""
        await self.run_blocking(self._load)

    def _load(self) -> None:
        split, validation_split = self._splits
        chats = open_chats(**self._source, split=split)
        own = open_chats(**self._source, split=validation_split) if validation_split else None
        self._held_out = hold_out(chats, self._validation_size, self._seed, own)
        self._validation_chats = own or chats
        self._renderer = ChatRenderer(
            load_tokenizer(self._tokenizer), self._seq_len, self._system_prompt, self._targets
        )
        self._batches = ChatBatches(
            chats, self._held_out.train, self._renderer, **self._shape, seed=self._seed
        )
        self._batches.batch(Position())

    @endpoint(retry=True)
    async def sizes(self) -> ChatSizes:
        """How many conversations there are."""
        held_out = self._held_out
        overlapping = held_out.num_overlapping
        return ChatSizes(len(held_out.train), len(held_out.validation), held_out.num_duplicates, overlapping)

    @endpoint(retry=True)
    async def batch(self, start: Position) -> ChatBatch:
        """The batch that begins at a position; the next begins at its `after`, and is made meanwhile."""
        if self._ahead is None or self._ahead[0] != start:
            self._begin(start)
        assert self._ahead is not None
        batch = await asyncio.shield(self._ahead[1])  # a caller that goes away does not end it
        self._begin(batch.after)
        record(
            "data",
            epoch=start.epoch + start.index / len(self._held_out.train),
            num_tokens=batch.num_tokens,
            num_targets=batch.num_targets,
            num_cut=batch.num_cut,
            num_dropped=batch.num_dropped,
        )
        return batch

    def _begin(self, start: Position) -> None:
        self._ahead = (start, asyncio.create_task(self.run_blocking(self._batches.batch, start)))

    async def teardown(self) -> None:
        """Waits for the batch that nobody will ask for."""
        if self._ahead is not None:
            await asyncio.gather(self._ahead[1], return_exceptions=True)

    @endpoint(retry=True)
    async def validation(self) -> list[list[TextTrainBatch]]:
        """All held-out conversations in batches, each with a part for every rank."""
        return await self.run_blocking(
            lambda: in_order(self._validation_chats, self._held_out.validation, self._renderer, **self._shape)
        )

    @endpoint(retry=True)
    async def questions(self, count: int) -> list[Question]:
        """The first questions of `count` held-out conversations, or as many as leave room for an answer
        within `seq_len` tokens; always the same."""
        return await self.run_blocking(self._choose, count)

    def _choose(self, count: int) -> list[Question]:
        questions = [self._question(row) for row in self._held_out.validation]
        fitting = [question for question in questions if self._has_room(question)]
        count = min(count, len(fitting))
        return [fitting[i * len(fitting) // count] for i in range(count)]

    def _has_room(self, question: Question) -> bool:
        token_ids = self._renderer.tokenizer(question.prompt, add_special_tokens=False)["input_ids"]
        return len(token_ids) < self._seq_len

    def _question(self, row: int) -> Question:
        messages = self._renderer.messages(self._validation_chats[row])
        turn = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        prompt = render_chat(self._renderer.tokenizer, messages[:turn], add_generation_prompt=True)
        return Question(prompt, messages[turn - 1]["content"], messages[turn]["content"])
