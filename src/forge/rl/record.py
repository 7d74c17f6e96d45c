"""Recorded episodes: what each step was trained on, in a file of plain data that any later run reads.

`write` puts them down, `read` gives them back, `rewind` takes back those of steps that a resumed run redoes.
"""

import dataclasses
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from forge.data_models import Completion, Episode
from forge.errors import ConfigError, ForgeError

FOLDER = "episodes"
"""Of a run's folder: where its record is."""

FORMAT = 1
"""Of the files. One of a later format is refused; one of an earlier one must still be read."""

_NAME = re.compile(r"step-(\d+)\.pt")


@dataclass(frozen=True, slots=True)
class Recorded:
    """The episodes of one step, in the order of its batch."""

    step: int  # from 1
    version: int  # of the policy that they were to train: steps done before
    episodes: list[Episode]


def write(folder: Path, step: int, episodes: Sequence[Episode], version: int) -> Path:
    """Writes the episodes of a step to its file, whole or not at all; returns where that is.

    Advantages are those of the batch. Of a completion's metadata only plain data is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = {"format": FORMAT, "step": step, "version": version, "episodes": [_plain(e) for e in episodes]}
    final = _file(folder, step)
    new = final.with_suffix(".new")
    with new.open("wb") as file:
        torch.save(stored, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, final)
    return final


def read(path: Path) -> Iterator[Recorded]:
    """What was recorded, by steps: in one file, in a folder of them, or in that of a run.

    Read as they are asked for. Raises ConfigError where there are none, ForgeError for a file that is not
    one of these.
    """
    for file in files(path):
        yield _read(file)


def files(path: Path) -> list[Path]:
    """The recorded files of a path that `read` takes, by steps; raises ConfigError where there are none."""
    if path.is_file():
        return [path]
    found = sorted(_steps(_folder(path)).items())
    if not found:
        raise ConfigError(
            f"{path} holds no recorded episodes (step-N.pt, in it or in its folder {FOLDER!r}): name a file, "
            "a folder of them, or the folder of a run that was started with record true"
        )
    return [file for _, file in found]


def read_step(path: Path, step: int) -> Recorded:
    """The episodes of this step; raises ConfigError where they were not recorded."""
    found = _files(path)
    if step not in found:
        have = f"{min(found)} to {max(found)}" if found else "none"
        raise ConfigError(f"step {step} is not recorded in {_folder(path)}, which has {have}")
    return _read(found[step])


def steps(path: Path) -> list[int]:
    """The numbers of the recorded steps of a path that `read` takes, in order."""
    return sorted(_files(path))


def rewind(folder: Path, step: int) -> None:
    """Deletes the files of all later steps, and those that a kill left half written."""
    for number, file in _steps(folder).items():
        if number > step:
            file.unlink()
    for file in folder.glob("step-*.new"):
        file.unlink()


def _files(path: Path) -> dict[int, Path]:
    return {_read(path).step: path} if path.is_file() else _steps(_folder(path))


def _folder(path: Path) -> Path:
    return path / FOLDER if (path / FOLDER).is_dir() else path


def _steps(folder: Path) -> dict[int, Path]:
    matches = ((_NAME.fullmatch(file.name), file) for file in folder.glob("step-*.pt"))
    return {int(match[1]): file for match, file in matches if match}


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.pt"


def _read(file: Path) -> Recorded:
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)  # a file from anywhere runs no code
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ForgeError(f"{file} can't be read as recorded episodes: {error}") from error
    if not isinstance(stored, dict) or "format" not in stored:
        raise ForgeError(f"{file} holds no recorded episodes")
    if stored["format"] != FORMAT:
        raise ForgeError(
            f"{file} is of format {stored['format']}, this forge reads format {FORMAT}: read it with the "
            "version that wrote it"
        )
    return Recorded(stored["step"], stored["version"], [_episode(plain) for plain in stored["episodes"]])


def _plain(episode: Episode) -> dict[str, Any]:
    plain = _fields(episode)
    for name in ("reward", "advantage"):  # of a user's code, which may make them with NumPy
        if not isinstance(plain[name], Tensor):
            plain[name] = float(plain[name])
    completion = _fields(episode.completion)
    completion["metadata"] = {k: v for k, v in episode.completion.metadata.items() if _is_plain(v)}
    return {**plain, "completion": completion}


def _episode(plain: Mapping[str, Any]) -> Episode:
    return Episode(**{**plain, "completion": Completion(**plain["completion"])})


def _fields(data: Episode | Completion) -> dict[str, Any]:
    """By name; of tensors only what is theirs, not the larger ones that they may be slices of."""
    values = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    return {name: _own(value) if isinstance(value, Tensor) else value for name, value in values.items()}


def _own(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _is_plain(value: object) -> bool:
    """Of subclasses, as NumPy's numbers are of float, a file can't be read without running code."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, cast("list[object]", value)))
    if type(value) is dict:
        return all(type(key) is str and _is_plain(each) for key, each in value.items())
    return value is None or type(value) in (str, int, float, bool)
