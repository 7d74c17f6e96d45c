"""[1] The places a dataset can come from: a reasoning-gym task, a local file or folder, Hugging Face."""

import dataclasses
import difflib
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from forge.data.rows import FilteredRows, IndexedRows, Position, Row, RowSource, Table
from forge.errors import DatasetError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from reasoning_gym.dataset import ProceduralDataset

TASK_PREFIX = "reasoning_gym/"
_DEFAULT_TASK_ROWS = 2000
_FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_SHUFFLE_BUFFER = 1000  # rows of a stream that are mixed at a time


def open_source(
    path: str,
    *,
    name: str | None = None,
    split: str = "train",
    streaming: bool = False,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> RowSource:
    """The rows of `path`: `reasoning_gym/TASK`, a local .jsonl, .json or .parquet file, a local folder of
    such files, or a dataset on Hugging Face.

    name: configuration of a Hugging Face dataset; options: the task's settings (reasoning-gym only; `size`
    rows, 2000 by default). A stream is mixed within a window of 1000 rows, everything else over all rows.
    Raises DatasetError when it can't be found, can't be read or is empty.
    """
    if path.startswith(TASK_PREFIX):
        task = _make_task(path.removeprefix(TASK_PREFIX), split, options or {}, seed)
        return IndexedRows(_TaskRows(task), seed)
    if options:
        raise DatasetError(
            f"dataset.options are for reasoning_gym/... tasks, got {dict(options)} for {path}: remove them"
        )
    table = _load(path, name, split, streaming)
    if streaming:
        return _StreamedRows(cast("IterableDataset", table), seed)
    return IndexedRows(cast("Dataset", table), seed)


def open_table(path: str, *, name: str | None = None, split: str = "train") -> Table:
    """The rows of a local .jsonl, .json or .parquet file, a folder of such files, or a dataset on Hugging
    Face, by their numbers. Raises DatasetError as `open_source` does."""
    return cast("Dataset", _load(path, name, split, streaming=False))


class _TaskRows:
    """The entries of a reasoning-gym task with its metadata as further columns (chain_sum: `expression`)."""

    def __init__(self, task: "ProceduralDataset"):
        self._task = task

    def __len__(self) -> int:
        return len(self._task)

    def __getitem__(self, number: int) -> Row:
        entry = self._task[number]
        return {**entry["metadata"], "question": entry["question"], "answer": entry["answer"]}


class _StreamedRows:
    """A Hugging Face stream, reshuffled each epoch. Starting in the middle reads what lies before."""

    num_rows: int | None = None

    def __init__(self, stream: "IterableDataset", seed: int):
        self._stream = stream
        self._seed = seed

    def rows(self, start: Position) -> Iterator[Row]:
        shuffled = self._stream.shuffle(seed=self._seed, buffer_size=_SHUFFLE_BUFFER).skip(start.index)
        shuffled.set_epoch(start.epoch)
        return iter(shuffled)

    def where(self, keep: Callable[[Row], bool]) -> RowSource:
        return FilteredRows(self, keep)


def _make_task(task: str, split: str, options: Mapping[str, Any], seed: int) -> "ProceduralDataset":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # one of its dependencies compares strings with `is`
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise DatasetError(f"reasoning-gym has no task {task!r}{_suggest(task, DATASETS)}")
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    for option in options:
        if option not in known:
            raise DatasetError(
                f"dataset.options: reasoning-gym's {task} has no option {option!r}{_suggest(option, known)}; "
                f"it has {known}"
            )
    # Entry i is made from seed + i: neighbouring seeds would share nearly all entries, as would splits.
    settings = {
        "size": _DEFAULT_TASK_ROWS,
        "seed": random.Random(f"{seed}/{split}").randrange(2**31),
        **options,
    }
    try:
        return reasoning_gym.create_dataset(task, **settings)
    except (AssertionError, ValueError, TypeError) as error:
        raise DatasetError(
            f"dataset.options {dict(options)} don't suit reasoning-gym's {task}: {error}"
        ) from error


def _load(path: str, name: str | None, split: str, streaming: bool) -> "Dataset | IterableDataset":
    """Reads files and Hugging Face datasets through `datasets`; never without a row."""
    import datasets
    from datasets.exceptions import DatasetsError

    arguments = _file_arguments(path, split) or {"path": path, "name": name}
    first = None
    try:
        table = datasets.load_dataset(**arguments, split=split, streaming=streaming)
        first = next(iter(table), None)
    except StopIteration:  # what `datasets` raises for a file without a byte
        table = None
    except (OSError, ValueError, DatasetsError) as error:
        cause = error.__cause__ or error
        reason = str(cause).strip().split("\n", 1)[0]
        raise DatasetError(
            f"can't load the dataset {path}, split {split} ({type(cause).__name__}: {reason})"
        ) from error
    if table is None or first is None:
        raise DatasetError(f"the dataset {path}, split {split}, is empty: no rows to ask")
    return table


def _file_arguments(path: str, split: str) -> dict[str, Any] | None:
    """What `load_dataset` needs to read a local file; None for a folder or a dataset on Hugging Face."""
    local = Path(path).expanduser()
    if local.is_dir() or not (local.suffix in _FILE_KINDS or path.startswith(("/", "./", "../", "~"))):
        return None
    if not local.is_file():
        raise DatasetError(f"no dataset file at {path} (looked for {local.absolute()})")
    if local.suffix not in _FILE_KINDS:
        raise DatasetError(f"dataset file {path} must end in one of {sorted(_FILE_KINDS)}")
    # The file is the split that is asked for, with or without a slice such as train[:100].
    return {"path": _FILE_KINDS[local.suffix], "data_files": {split.partition("[")[0]: str(local.absolute())}}


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
