"""[1] Where questions and their answers stand, and how a row of it becomes a Sample."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.data.rows import Position, Row, RowSource
from forge.data.sources import open_source
from forge.data.tokenizer import render_prompt
from forge.data_models import Sample
from forge.errors import DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Data of questions: the arguments of `open_source`, and the columns."""

    path: str
    name: str | None = None
    split: str = "train"
    streaming: bool = False
    options: Mapping[str, Any] | None = None
    prompt_column: str = "question"
    target_column: str = "answer"

    def open(self, seed: int) -> RowSource:
        """The rows in the order of a seed. Raises DatasetError when they can't be had, or have no such
        columns."""
        source = open_source(
            self.path,
            name=self.name,
            split=self.split,
            streaming=self.streaming,
            options=self.options,
            seed=seed,
        )
        first = next(source.rows(Position()))
        for column in (self.prompt_column, self.target_column):
            if column not in first:
                raise DatasetError(
                    f"dataset {self.path} has no column {column!r}: its columns are {sorted(first)}"
                )
        return source

    def words(self, row: Row) -> str:
        """What a row asks. Two rows ask the same where this is the same: the white space does not count."""
        return " ".join(str(row[self.prompt_column]).split())

    def sample(
        self, row: Row, number: int, tokenizer: "PreTrainedTokenizerBase", system_prompt: str | None
    ) -> Sample:
        """The row, ready to be asked. Raises DatasetError, naming the number, for one that can't be."""
        question, answer = row[self.prompt_column], row[self.target_column]
        where = f"dataset {self.path}, question {number} in the order of its seed"
        if not isinstance(question, str) or not question.strip():
            raise DatasetError(f"{where}: column {self.prompt_column!r} must be text, got {question!r:.80}")
        target = final_answer(str(answer)) if isinstance(answer, str | int | float) else ""
        if not target:
            raise DatasetError(
                f"{where}: column {self.target_column!r} must be text or a number, got {answer!r:.80} "
                f"for {question!r:.80}"
            )
        request = render_prompt(tokenizer, question, system_prompt)
        return {"request": request, "target": target, "question": question}


def final_answer(target: str) -> str:
    """What stands after the last `####` of a GSM8K answer, without commas; the whole text if there is none.

    >>> final_answer("16 - 3 = 13 ... #### 1,300"), final_answer("a, b")
    ('1300', 'a, b')
    """
    _, mark, answer = target.rpartition("####")
    return answer.strip().replace(",", "") if mark else target.strip()
