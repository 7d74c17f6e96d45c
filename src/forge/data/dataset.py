"""[1] DatasetActor hands out questions with their answers, one Sample at a time and without end."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from forge.controller import ForgeActor, call_id, endpoint
from forge.controller.journal import Journal
from forge.data.rows import EndlessRows, Position, Row
from forge.data.sources import open_source
from forge.data.tokenizer import load_tokenizer, render_prompt
from forge.data_models import Sample
from forge.errors import DatasetError

REMEMBERED_ANSWERS = 1024  # far more than the calls that a lost process can have been serving


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What is known of a dataset and how far it has been read; num_rows is None for a stream."""

    num_rows: int | None
    position: Position


@dataclass(frozen=True, slots=True)
class Served:
    """A row that was handed out: to which call, where reading goes on, and what the call was answered."""

    call: str | None
    position: Position
    answer: Sample | DatasetError


class DatasetActor(ForgeActor):
    """Serves a dataset as prompts with targets, reshuffled each epoch from the seed.

    path: `reasoning_gym/TASK`, a local .jsonl, .json or .parquet file, a folder of such files, or a dataset
    on Hugging Face (`openai/gsm8k`, with `name`, `split`, `streaming` as `datasets.load_dataset` has them);
    prompt_column, target_column: where the question and the answer stand;
    system_prompt: see `render_prompt`;
    options: settings of a reasoning-gym task, e.g. {"min_terms": 2, "max_terms": 2};
    tokenizer: the model (its folder, or anything `fetch` takes) whose chat template makes the prompt.

    Wrong arguments and unreadable data raise DatasetError or AssetError when the actor starts.

    Every row handed out is in its journal before the caller has it. The process that takes the place of a
    killed one reads on from there, and a call that is repeated gets the row it had: none is skipped, and none
    is asked twice.
    """

    recovers: ClassVar[bool] = True

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str = "train",
        streaming: bool = False,
        prompt_column: str = "question",
        target_column: str = "answer",
        system_prompt: str | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        tokenizer: str,
        seed: int = 0,
    ):
        self._path = path
        self._open_source = partial(
            open_source, path, name=name, split=split, streaming=streaming, options=options, seed=seed
        )
        self._prompt_column = prompt_column
        self._target_column = target_column
        self._system_prompt = system_prompt
        self._tokenizer_name = tokenizer
        self._served: deque[Served] = deque(maxlen=REMEMBERED_ANSWERS)  # the newest
        self._journal: Journal | None = None

    async def setup(self) -> None:
        """Loads data and tokenizer, and makes one sample: what is wrong shows before training starts.

        Reading goes on where the process before this one was killed.
        """
        await self.run_blocking(self._load)

    @endpoint(retry=True)
    async def sample(self) -> Sample:
        """The next question; concurrent calls each get their own."""
        return await self.run_blocking(self._answer, call_id())

    @endpoint(retry=True)
    async def info(self) -> DatasetInfo:
        """Number of rows and position."""
        return await self.run_blocking(lambda: DatasetInfo(self._rows.source.num_rows, self._rows.position))

    def _load(self) -> None:
        self._tokenizer = load_tokenizer(self._tokenizer_name)
        source = self._open_source()
        first = next(source.rows(Position()))
        for column in (self._prompt_column, self._target_column):
            if column not in first:
                raise DatasetError(
                    f"dataset {self._path} has no column {column!r}: its columns are {sorted(first)}"
                )
        self._to_sample(first, Position())
        if self.state_dir is not None:
            self._journal = Journal(self.state_dir / "dataset.journal")
            self._served.extend(self._journal.records)
            self._journal.records.clear()
        self._rows = EndlessRows(source, self._served[-1].position if self._served else None)

    def _answer(self, call: str | None) -> Sample:
        """What the call was answered before, else the next row. A row that can't be asked is served, too:
        to repeat the call must not skip it silently.
        """
        known = (served for served in self._served if served.call == call)
        served = next(known, None) if call is not None else None
        if served is None:
            served = self._serve(call)
        if isinstance(served.answer, DatasetError):
            raise served.answer
        return served.answer

    def _serve(self, call: str | None) -> Served:
        position = self._rows.position
        row = next(self._rows)
        try:
            answer = self._to_sample(row, position)
        except DatasetError as error:
            answer = error.with_traceback(None)
        served = Served(call, self._rows.position, answer)
        if self._journal is not None:
            self._journal.append(served)
        self._served.append(served)
        if self._journal is not None and self._journal.has_outgrown:
            self._journal.rewrite(self._served)
        return served

    def _to_sample(self, row: Row, position: Position) -> Sample:
        question, answer = row[self._prompt_column], row[self._target_column]
        where = f"dataset {self._path}, shuffled row {position.index} of epoch {position.epoch}"
        if not isinstance(question, str) or not question.strip():
            raise DatasetError(f"{where}: column {self._prompt_column!r} must be text, got {question!r:.80}")
        target = final_answer(str(answer)) if isinstance(answer, str | int | float) else ""
        if not target:
            raise DatasetError(
                f"{where}: column {self._target_column!r} must be text or a number, got {answer!r:.80} "
                f"for {question!r:.80}"
            )
        return {"request": render_prompt(self._tokenizer, question, self._system_prompt), "target": target}


def final_answer(target: str) -> str:
    """What stands after the last `####` of a GSM8K answer, without commas; the whole text if there is none.

    >>> final_answer("16 - 3 = 13 ... #### 1,300"), final_answer("a, b")
    ('1300', 'a, b')
    """
    _, mark, answer = target.rpartition("####")
    return answer.strip().replace(",", "") if mark else target.strip()
