"""[1] DatasetActor hands out questions with their answers, one Sample at a time and without end."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from forge.controller import ForgeActor, call_id, endpoint
from forge.controller.journal import Journal
from forge.data.held_out import HeldOut
from forge.data.numbered_rows import NumberedRows
from forge.data.questions import Questions
from forge.data.rows import Position, Row
from forge.data.tokenizer import load_tokenizer
from forge.data_models import Sample
from forge.errors import DatasetError

REMEMBERED_ANSWERS = 1024  # far more than the calls that a lost process can have been serving


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What is known of a dataset and how far it has been read."""

    num_rows: int | None  # of an epoch; None: a stream whose first epoch has not been read to its end
    next_number: int  # of the question that the next call without a number gets


@dataclass(frozen=True, slots=True)
class Served:
    """A row that was handed out: to which call, where reading goes on, and what the call was answered. With
    neither call nor answer: where reading was told to go on."""

    call: str | None
    info: DatasetInfo
    answer: Sample | DatasetError | None


class DatasetActor(ForgeActor):
    """Serves a dataset as prompts with targets, reshuffled each epoch from the seed.

    path: `reasoning_gym/TASK`, a local .jsonl, .json or .parquet file, a folder of such files, or a dataset
    on Hugging Face (`openai/gsm8k`, with `name`, `split`, `streaming` as `datasets.load_dataset` has them);
    prompt_column, target_column: where the question and the answer stand;
    system_prompt: see `render_prompt`;
    options: settings of a reasoning-gym task, e.g. {"min_terms": 2, "max_terms": 2};
    tokenizer: the model (its folder, or anything `fetch` takes) whose chat template makes the prompt;
    held_out: questions to evaluate by, say {"size": 64, "split": "test"} (see `HeldOut.of`), chosen by the
    seed. No row that asks one of them is ever served.

    Wrong arguments and unreadable data raise DatasetError or AssetError when the actor starts.

    Questions have numbers, 0, 1, 2, ... through all epochs, and `sample(number)` depends on seed and number
    alone. A call without a number gets the next one. That one is in the actor's journal before the caller has
    it: the process that takes the place of a killed one reads on from there, and a call that is repeated gets
    the row it had. None is skipped, and none is asked twice.
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
        held_out: Mapping[str, Any] | None = None,
    ):
        self._questions = Questions(
            path=path,
            name=name,
            split=split,
            streaming=streaming,
            options=options,
            prompt_column=prompt_column,
            target_column=target_column,
        )
        self._held_out = None if held_out is None else HeldOut.of(held_out, self._questions)
        self._seed = seed
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
    async def sample(self, number: int | None = None) -> Sample:
        """The question of this number. None: the next one; concurrent calls each get their own."""
        if number is not None and number < 0:
            raise DatasetError(f"questions are numbered from 0, got number {number}")
        return await self.run_blocking(self._answer, number, call_id())

    @endpoint(retry=True)
    async def held_out(self) -> list[Sample]:
        """The held-out questions, the same in every run with this seed; none where none were asked for."""
        return self._held_out_samples

    @endpoint(retry=True)
    async def info(self) -> DatasetInfo:
        """Number of rows, and of the next question."""
        return await self.run_blocking(self._info)

    @endpoint(retry=True)
    async def state_dict(self) -> dict[str, int | None]:
        """Where calls without a number go on, and what a stream needs to get there fast."""
        info = await self.run_blocking(self._info)
        return {"number": info.next_number, "epoch_length": info.num_rows}

    @endpoint(retry=True)
    async def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Goes on where `state_dict` was taken. Raises DatasetError where the data is not what it was."""
        await self.run_blocking(self._load_state, state)

    def _load(self) -> None:
        self._tokenizer = load_tokenizer(self._tokenizer_name)
        self._held_out_samples: list[Sample] = []
        if self._held_out is None:
            source = self._questions.open(self._seed)
        else:
            rows, source = self._held_out.out_of(self._questions, self._seed)
            for number, row in enumerate(rows):
                self._held_out_samples.append(self._to_sample(self._held_out.questions, row, number))
        self._to_sample(self._questions, next(source.rows(Position())), 0)
        if self.state_dir is not None:
            self._journal = Journal(self.state_dir / "dataset.journal")
            self._served.extend(self._journal.records)
            self._journal.records.clear()
        newest = self._served[-1].info if self._served else DatasetInfo(None, 0)
        self._rows = NumberedRows(source, newest.num_rows)
        self._next_number = newest.next_number

    def _info(self) -> DatasetInfo:
        return DatasetInfo(self._rows.epoch_length, self._next_number)

    def _load_state(self, state: Mapping[str, int | None]) -> None:
        number, length = state["number"], state["epoch_length"]
        if None not in (length, self._rows.epoch_length) and length != self._rows.epoch_length:
            raise DatasetError(
                f"dataset {self._questions.path} has {self._rows.epoch_length} rows, and {length} when the "
                "state was saved: to go on where it was, the data must be the same"
            )
        assert number is not None
        self._rows.epoch_length, self._next_number = self._rows.epoch_length or length, number
        self._remember(Served(None, self._info(), None))

    def _answer(self, number: int | None, call: str | None) -> Sample:
        """The sample of that number, or what the call was answered before, else the next one. A row that
        can't be asked is served, too: to repeat the call must not skip it silently.
        """
        if number is not None:
            return self._to_sample(self._questions, self._rows[number], number)
        known = (served for served in self._served if served.call == call)
        served = next(known, None) if call is not None else None
        answer = self._serve(call) if served is None else served.answer
        if isinstance(answer, DatasetError):
            raise answer
        assert answer is not None
        return answer

    def _serve(self, call: str | None) -> Sample | DatasetError:
        row = self._rows[self._next_number]
        try:
            answer = self._to_sample(self._questions, row, self._next_number)
        except DatasetError as error:
            answer = error.with_traceback(None)
        self._next_number += 1
        self._remember(Served(call, self._info(), answer))
        return answer

    def _remember(self, served: Served) -> None:
        if self._journal is not None:
            self._journal.append(served)
        self._served.append(served)
        if self._journal is not None and self._journal.has_outgrown:
            self._journal.rewrite(self._served)

    def _to_sample(self, questions: Questions, row: Row, number: int) -> Sample:
        return questions.sample(row, number, self._tokenizer, self._system_prompt)
