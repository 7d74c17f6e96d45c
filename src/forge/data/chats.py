"""[1] Conversations, out of the forms that chat data comes in, and those that are held out of training."""

import hashlib
import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from forge.data.assets import package_path
from forge.data.rows import Row, Table
from forge.data.sources import open_table
from forge.errors import DatasetError

logger = logging.getLogger(__name__)

PACKAGE_PREFIX = "pkg://"
ROLES = {"system", "user", "assistant"}
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
NOT_LEARNT = ("reasoning_content", "reasoning", "thinking", "tool_calls", "function_call")
"""What a message may hold beside its content, and would lose."""


Message = dict[str, str]
"""One turn: {"role": system, user or assistant, "content": text}."""

Conversation = list[Message]


class Chats:
    """The conversations of a table by their numbers; each row is checked when it is read.

    A row is a conversation in one of three forms: `messages` as OpenAI writes them, a list of {role,
    content}; `conversations` as ShareGPT does, a list of {from, value}; or a question and its answer in two
    columns.
    """

    def __init__(
        self,
        table: Table,
        name: str,
        prompt_column: str | None,
        answer_column: str | None,
        *,
        needs_last_answer: bool = False,
    ) -> None:
        self._table = table
        self._name = name
        self._needs_last_answer = needs_last_answer
        self._columns = (prompt_column, answer_column)
        columns = list(table[0])
        for column in self._columns if prompt_column else ():
            if column not in columns:
                raise DatasetError(f"{name} has no column {column!r}: its columns are {sorted(columns)}")
        if not prompt_column and not {"messages", "conversations"} & set(columns):
            raise DatasetError(
                f"{name} has neither a column 'messages' nor 'conversations', but {sorted(columns)}: set "
                "dataset.prompt_column and dataset.answer_column"
            )

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: int) -> Conversation:
        """Raises DatasetError naming the row and what is wrong with it."""
        where = f"{self._name}, row {number}"
        conversation = self._read(self._table[number], where)
        if not any(m["role"] == "assistant" and m["content"].strip() for m in conversation):
            raise DatasetError(f"{where}: no assistant turn with text, so there is nothing to learn")
        answers = [m["content"] for m in conversation if m["role"] == "assistant"]
        if self._needs_last_answer and not answers[-1].strip():
            raise DatasetError(
                f"{where}: the last answer is empty, and dataset.targets is last: remove that turn or the row"
            )
        if conversation[0]["role"] == "assistant":
            raise DatasetError(f"{where} begins with the assistant: there is no question to answer")
        return conversation

    def _read(self, row: Row, where: str) -> Conversation:
        prompt_column, answer_column = self._columns
        if prompt_column and answer_column:
            parts = (("user", prompt_column), ("assistant", answer_column))
            return [_message(role, row[column], f"{where}: {column}") for role, column in parts]
        if row.get("tools"):
            raise DatasetError(
                f"{where}: tools are not shown to the model: describe them in a system message, or leave the "
                "column out"
            )
        if row.get("messages") is not None or "conversations" not in row:
            return _messages(
                row.get("messages"), f"{where}: messages", "role", "content", {r: r for r in ROLES}
            )
        return _messages(row["conversations"], f"{where}: conversations", "from", "value", SHAREGPT_ROLES)


def open_chats(
    path: str,
    *,
    name: str | None = None,
    split: str = "train",
    prompt_column: str | None = None,
    answer_column: str | None = None,
    needs_last_answer: bool = False,
) -> Chats:
    """The conversations at `path`: what `open_table` takes, or `pkg://package/path`, a YAML file or a folder
    of them inside an installed Python package, each with `conversations`, lists of turns that alternate
    between user and assistant (the form of the package chatterbot-corpus).

    needs_last_answer: whether a conversation whose last answer is empty is an error. Raises DatasetError when
    it can't be found or read, or has other columns.
    """
    if (prompt_column is None) != (answer_column is None):
        raise DatasetError(
            f"prompt_column and answer_column go together, got {prompt_column!r} and {answer_column!r}"
        )
    if not path.startswith(PACKAGE_PREFIX):
        table = open_table(path, name=name, split=split)
        where, columns = f"dataset {path}, split {split}", (prompt_column, answer_column)
        return Chats(table, where, *columns, needs_last_answer=needs_last_answer)
    if split != "train":
        raise DatasetError(
            f"dataset {path} has one split, train, got {split!r}: set dataset.split to train, and "
            "validation.split to null"
        )
    if prompt_column:
        raise DatasetError(
            f"dataset {path} has no columns: set dataset.prompt_column and answer_column to null"
        )
    rows = _read_corpus(package_path(path, ".yml"), path)
    return Chats(rows, f"dataset {path}", None, None, needs_last_answer=needs_last_answer)


def question_of(conversation: Conversation) -> str:
    """The first words of the user, lower-case and with single spaces: what two conversations share when they
    answer the same question."""
    first = next((m["content"] for m in conversation if m["role"] == "user"), "")
    return " ".join(first.lower().split())


@dataclass(frozen=True, slots=True)
class Holdout:
    """The rows to train on and those to validate on: no question of the one is among those of the other."""

    train: list[int]
    validation: list[int]  # of the validation's own table where it has one
    num_duplicates: int  # conversations left out because an earlier one is the same word for word
    num_overlapping: int  # left out because the validation's own table asks their question, too


def hold_out(
    chats: Sequence[Conversation] | Chats, size: int, seed: int, own: Chats | None = None
) -> Holdout:
    """Chooses `size` conversations to validate on, by the seed: out of `own` where the validation has a
    split of its own, else out of `chats`. Reads every row once, so that a bad one is told before training.

    Conversations that answer the same question go together, else the validation would tell what was learnt
    by heart. Raises DatasetError where nothing is left to train on.
    """
    groups, num_duplicates = _by_question(chats)
    candidates = groups if own is None else _by_question(own)[0]
    questions = list(candidates)
    random.Random(f"{seed}/validation").shuffle(questions)
    validation: list[int] = []
    held_out: set[str] = set()
    for question in questions:
        if len(validation) + len(candidates[question]) <= size:
            validation += candidates[question]
            held_out.add(question)
    train = sorted(row for question, rows in groups.items() if question not in held_out for row in rows)
    if not train:
        raise DatasetError(
            f"validation.size {size} leaves nothing to train on: there are {len(chats) - num_duplicates} "
            "different conversations"
        )
    num_out = len(chats) - num_duplicates - len(train)
    return Holdout(train, sorted(validation), num_duplicates, num_out if own is not None else 0)


class _CorpusRows:
    """Conversations of a packaged corpus as a table."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        return self._rows[number]


def _by_question(chats: Sequence[Conversation] | Chats) -> tuple[dict[str, list[int]], int]:
    groups: dict[str, list[int]] = {}
    seen: set[bytes] = set()
    for number in range(len(chats)):
        conversation = chats[number]
        content = hashlib.blake2b(json.dumps(conversation).encode(), digest_size=16).digest()
        if content not in seen:
            seen.add(content)
            groups.setdefault(question_of(conversation), []).append(number)
    return groups, len(chats) - len(seen)


def _read_corpus(place: Path, path: str) -> Table:
    files = sorted(place.glob("*.yml")) if place.is_dir() else [place]
    rows = [row for file in files for row in _read_corpus_file(file)]
    if not rows:
        raise DatasetError(f"dataset {path} has no conversations: no .yml file in {place} holds any")
    return _CorpusRows(rows)


def _read_corpus_file(file: Path) -> list[Row]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DatasetError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    conversations = content.get("conversations") if isinstance(content, dict) else None
    if not isinstance(conversations, list):
        raise DatasetError(f"{file} has no list 'conversations'")
    rows = []
    for number, turns in enumerate(conversations):
        if isinstance(turns, list):
            roles = ("user", "assistant")
            rows.append(
                {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}
            )
        else:  # nobody can mend a file inside a published package
            logger.warning(
                "%s, conversation %d is left out: no list of turns, but %.60r", file, number, turns
            )
    return rows


def _messages(
    messages: Any, where: str, role_key: str, content_key: str, roles: Mapping[str, str]
) -> Conversation:
    if not isinstance(messages, list) or not messages:
        raise DatasetError(f"{where} must be a list of {{{role_key}, {content_key}}}, got {messages!r:.80}")
    conversation = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {role_key, content_key} <= message.keys():
            raise DatasetError(f"{where}[{i}] must have {role_key} and {content_key}, got {message!r:.80}")
        role = message[role_key]
        if role not in roles:
            raise DatasetError(f"{where}[{i}].{role_key} must be one of {sorted(roles)}, got {role!r}")
        for key in NOT_LEARNT:
            if message.get(key):
                raise DatasetError(
                    f"{where}[{i}].{key} would not be learnt, only {content_key} is: write it into "
                    f"{content_key} as the model is to write it, or remove it"
                )
        conversation.append(_message(roles[role], message[content_key], f"{where}[{i}].{content_key}"))
    return conversation


def _message(role: str, content: Any, where: str) -> Message:
    if not isinstance(content, str):
        raise DatasetError(f"{where} must be text, got {content!r:.80}")
    return {"role": role, "content": content}
