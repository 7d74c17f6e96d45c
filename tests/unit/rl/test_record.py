"""What was recorded comes back, whatever else lies in the folder."""

import dataclasses
import pickle
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from forge.data_models import Completion, Episode
from forge.errors import ConfigError, ForgeError
from forge.rl import record
from forge.rl.record import Recorded


def episode(number: int, advantage: float | Tensor = 0.5) -> Episode:
    block = torch.arange(1000)  # of which a completion's tensors are slices
    completion = Completion(
        text="seven",
        token_ids=block[number : number + 3],
        logprobs=torch.tensor([-0.5, -1.5, -2.5]),
        metadata={"tries": [1, 2], "object": Path("of a class")},
        prompt_ids=block[:2],
        generator_version=4,
        stop_reason="stop",
        temperature=0.7,
        token_versions=torch.tensor([4, 4, 5]),
    )
    return Episode(f"7/{number}", "7", completion, "7", 1.0, advantage, torch.zeros(3))


def assert_same(got: object, want: object) -> None:
    for field in dataclasses.fields(want):  # type: ignore[arg-type]
        a, b = getattr(got, field.name), getattr(want, field.name)
        if dataclasses.is_dataclass(b):
            assert_same(a, b)
        elif isinstance(b, Tensor):
            assert torch.equal(a, b) and a.dtype == b.dtype, field.name
        elif field.name != "metadata":
            assert (type(a), a) == (type(b), b), field.name


def test_episodes_come_back_by_steps_and_runs_go_back(tmp_path: Path) -> None:
    folder = tmp_path / "episodes"
    by_token = torch.tensor([0.1, -0.2, 0.3])
    for step in (12, 2, 100):
        record.write(folder, step, [episode(step), episode(3, by_token)], version=step - 1)
    (folder / "step-000101.new").write_bytes(b"killed here")
    (folder / "notes.txt").write_text("of somebody else")
    for path in (folder, tmp_path):
        found = list(record.read(path))
        assert [(r.step, r.version) for r in found] == [(2, 1), (12, 11), (100, 99)]
    assert_same(found[1].episodes[0], episode(12))
    assert_same(found[1].episodes[1], episode(3, by_token))
    assert found[1].episodes[0].completion.metadata == {"tries": [1, 2]}
    assert [r.step for r in record.read(folder / "step-000012.pt")] == [12]
    assert record.read_step(tmp_path, 100).step == 100
    assert (folder / "step-000012.pt").stat().st_size < 8_000  # not the whole block of each
    record.rewind(folder, 11)
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "step-000002.pt"]


def test_numbers_of_numpy_are_read_again(tmp_path: Path) -> None:
    written = dataclasses.replace(episode(1, cast(float, np.float64(0.5))), reward=cast(float, np.float32(1)))
    written.completion.metadata.update({"score": np.float64(2), "scores": [np.float64(2)], "none": None})
    record.write(tmp_path, 1, [written], version=0)
    [found] = record.read_step(tmp_path, 1).episodes
    assert_same(found, episode(1))
    assert found.completion.metadata == {"tries": [1, 2], "none": None}


class Runs:
    """Says where it was unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code of the file was run')",)


def test_what_is_no_record_is_told_and_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "step-1.pt").write_bytes(pickle.dumps(Runs(), protocol=2))
    (tmp_path / "step-2.pt").write_bytes(b"garbage")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "step-3.pt")
    torch.save({"format": 99, "episodes": []}, tmp_path / "step-4.pt")
    wants = [
        "can't be read",
        "can't be read",
        "holds no recorded episodes",
        "is of format 99, this forge reads",
    ]
    for number, want in enumerate(wants, start=1):
        with pytest.raises(ForgeError, match=f"step-{number}.pt .*{want}|step-{number}.pt {want}"):
            list(record.read(tmp_path / f"step-{number}.pt"))
    with pytest.raises(ConfigError, match="holds no recorded episodes .* name a file"):
        list(record.read(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="step 9 is not recorded in .*, which has 1 to 4"):
        record.read_step(tmp_path, 9)


def test_an_interrupted_write_leaves_the_file_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.write(tmp_path, 1, [episode(1)], version=0)

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.os, "fsync", no_room)
    with pytest.raises(OSError, match="No space left"):
        record.write(tmp_path, 1, [episode(2)], version=0)
    [found] = record.read(tmp_path)
    assert isinstance(found, Recorded) and found.episodes[0].episode_id == "7/1"
