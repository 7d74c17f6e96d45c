"""Which checkpoints of a folder count, which are whole, and what stays of them after kills."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from forge.actors.trainer.checkpoint_folder import CheckpointFolder


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "saved")


def write(folder: CheckpointFolder, step: int, value: float | None = None) -> None:
    folder.drop_partial()
    tensor = torch.full((1000,), float(step) if value is None else value)
    dcp.save({"weight": tensor}, checkpoint_id=folder.partial(step))


def add(folder: CheckpointFolder, *steps: int) -> None:
    for step in steps:
        write(folder, step)
        folder.finish(step)


def value_of(folder: CheckpointFolder, step: int) -> float:
    weight = torch.zeros(1000)
    dcp.load({"weight": weight}, checkpoint_id=folder.of(step))
    return weight[0].item()


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def test_only_complete_checkpoints_count_and_kills_are_tidied_up(folder: CheckpointFolder) -> None:
    assert folder.steps() == []
    add(folder, 9, 10)
    write(folder, 11)  # killed before it took its place
    (folder.partial(12)).mkdir()
    (folder.partial(12) / "__0_0.distcp").write_bytes(b"garbage")
    for name in ("step-30", "step-40.notes", "bad_batches"):
        (folder.path / name).mkdir()
        (folder.path / name / "model.safetensors.index.json").write_text("of somebody else")
    assert folder.steps() == [9, 10]
    folder.tidy()
    assert names(folder) == ["bad_batches", "step-10", "step-30", "step-40.notes", "step-9"]


def test_one_of_the_same_step_is_replaced_and_a_kill_leaves_one_of_them(folder: CheckpointFolder) -> None:
    add(folder, 5)
    write(folder, 5, value=7.0)
    assert value_of(folder, 5) == 5.0
    folder.finish(5)
    assert value_of(folder, 5) == 7.0 and names(folder) == ["step-5"]
    folder.of(5).rename(folder.path / "step-5.old")  # killed between the two renames
    folder.tidy()
    assert value_of(folder, 5) == 7.0 and names(folder) == ["step-5"]
    add(folder, 6)
    folder.of(5).rename(folder.path / "step-6.old")  # killed after them
    folder.tidy()
    assert value_of(folder, 6) == 6.0 and names(folder) == ["step-6"]


def test_the_newest_stay_and_those_that_are_needed(folder: CheckpointFolder) -> None:
    add(folder, 2, 9, 10, 100)
    write(folder, 101)
    folder.purge(2, also_kept=[2])
    assert names(folder) == ["step-10", "step-100", "step-101.partial", "step-2"]
    folder.purge(1, also_kept=[])
    assert folder.steps() == [100]


def test_an_old_one_that_can_not_be_deleted_is_told_and_the_others_are(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add(folder, 1, 2, 3)
    rmtree = shutil.rmtree

    def refuse(path: Path) -> None:
        if path == folder.partial(1):
            raise PermissionError(13, "Permission denied", str(path / "__0_0.distcp"))
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    folder.purge(1, also_kept=[])
    assert folder.steps() == [3] and not folder.of(2).exists()
    assert f"{folder.of(1)} is no longer needed, but can't be deleted: " in caplog.text


def test_damage_is_named(folder: CheckpointFolder) -> None:
    add(folder, 1, 2, 3, 4, 5)
    [data] = folder.of(2).glob("*.distcp")
    data.write_bytes(data.read_bytes()[:3000])
    [gone] = folder.of(3).glob("*.distcp")
    gone.unlink()
    (folder.of(4) / ".metadata").write_bytes(b"garbage")
    assert folder.damage(1) is None
    told = folder.damage(2)
    assert told is not None and told.startswith(f"{data.name} has 3000 of ")
    assert folder.damage(3) == f"{gone.name} is missing"
    assert folder.damage(4) == ".metadata can't be read (UnpicklingError)"
    (folder.of(5) / ".metadata").unlink()  # as `mv step-5/*` leaves it behind
    folder.tidy()
    assert folder.damage(5) == ".metadata can't be read (FileNotFoundError)"
    folder.set_aside(4)
    assert folder.steps() == [1, 2, 3, 5] and (folder.path / "step-4.damaged").is_dir()


def test_one_that_is_killed_while_it_is_deleted_does_not_count(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Nothing is done after it."""

    def kill(path: Path) -> None:
        next(path.glob("*.distcp")).unlink()
        raise Killed

    add(folder, 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", kill)
        with pytest.raises(Killed):
            folder.purge(1, also_kept=[])
    assert folder.steps() == [2]
    folder.tidy()
    assert names(folder) == ["step-2"]


def test_those_after_the_step_to_start_from_are_set_aside(folder: CheckpointFolder) -> None:
    add(folder, 1, 2, 3, 10)
    folder.set_later_aside(None)
    assert folder.steps() == [1, 2, 3, 10]
    folder.set_later_aside(2)
    assert names(folder) == ["step-1", "step-10.later", "step-2", "step-3.later"]
    folder.tidy()
    assert folder.steps() == [1, 2]
