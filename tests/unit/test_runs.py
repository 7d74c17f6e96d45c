"""The folder of a run: which one it is, who may use it, and what a resume does to its files."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from apps.grpo.config import load_config
from apps.sft.config import SFTConfig
from forge.app import METRICS, SAMPLES, Run
from forge.config import describe
from forge.controller import Runtime
from forge.errors import ConfigError
from forge.runs import CONFIG, LAST, earlier_folder, has_checkpoint, lock, new_folder


def config_of(out: Path, resume: str | None = None) -> SFTConfig:
    return SFTConfig("model", output_dir=str(out), resume=resume, epochs=3)


def write_run(folder: Path, *checkpoints: str) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("epochs: 1")
    for name in checkpoints:
        (folder / "checkpoints" / name).mkdir(parents=True)
        (folder / "checkpoints" / name / ".metadata").touch()
    return folder


def test_two_runs_of_one_second_have_a_folder_each(tmp_path: Path) -> None:
    folders = {new_folder(tmp_path / "out") for _ in range(3)}
    assert len(folders) == 3 and all(folder.is_dir() for folder in folders)


def test_the_last_run_is_the_newest_with_a_checkpoint_that_is_complete(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run to go on with"):
        earlier_folder(LAST, tmp_path)
    first = write_run(tmp_path / "1")
    assert earlier_folder(LAST, tmp_path) == first
    saved = write_run(tmp_path / "2", "step-4")
    newest = write_run(tmp_path / "3", "step-9.partial", "step-9.damaged")
    assert earlier_folder(LAST, tmp_path) == saved
    assert earlier_folder(str(newest), tmp_path) == newest
    assert has_checkpoint(saved, 4) and not has_checkpoint(saved, 9) and not has_checkpoint(newest)
    with pytest.raises(ConfigError, match="no folder of a run"):
        earlier_folder(str(tmp_path), tmp_path)


def test_the_last_run_is_no_replay_and_no_rollouts_alone(tmp_path: Path) -> None:
    trained = write_run(tmp_path / "1")
    (trained / CONFIG).write_text(describe(load_config([]).config))
    for name, asked in (("2", f"replay={trained}"), ("3", "rollout_only=true")):
        (write_run(tmp_path / name, "step-4") / CONFIG).write_text(describe(load_config([asked]).config))
    assert earlier_folder(LAST, tmp_path) == trained


def test_what_a_run_was_asked_for_starts_a_new_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "1", "step-4")
    run = Run(config_of(tmp_path, LAST))
    run.started(done=4)
    run.close()
    assert "resume: null" in (folder / CONFIG).read_text()


@pytest.mark.parametrize("checkpoints", [(), ("step-1",)])
def test_the_end_of_a_run_that_is_stopped_says_whether_it_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoints: tuple[str, ...]
) -> None:
    """A step whose update was skipped has a row, and may have nothing to save."""
    folder = write_run(tmp_path / "1", *checkpoints)
    run = Run(config_of(tmp_path, str(folder)))
    run.step = 1
    with pytest.raises(asyncio.CancelledError):
        run.interrupted()
    run.close()
    assert ("not saved: no update" if not checkpoints else "saved after step 1") in capsys.readouterr().out


def test_a_run_that_still_lives_is_not_resumed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "1", "step-4")
    with lock(folder), pytest.raises(ConfigError, match=r"still goes on, in process \d+: stop it first"):
        Run(config_of(tmp_path, LAST))
    Run(config_of(tmp_path, LAST)).close()


def test_a_resume_changes_nothing_before_it_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "1", "step-4")
    before = "".join(json.dumps({"step": n, "loss/total": float(n)}) + "\n" for n in range(6)) + '{"st'
    for name in (METRICS, SAMPLES):
        (folder / name).write_text(before)
    Run(config_of(tmp_path, LAST)).close()  # refused: nothing hides why
    assert (folder / METRICS).read_text() == before and (folder / "config.yaml").read_text() == "epochs: 1"

    run = Run(config_of(tmp_path, LAST))
    run.started(steps=6, done=4)
    assert f"goes on from {folder} after step 4" in capsys.readouterr().out
    assert "epochs: 3" in (folder / "config.yaml").read_text()
    assert [json.loads(line)["step"] for line in (folder / METRICS).open()] == list(range(5))
    assert not run.reopen(4, "loss/total")
    assert run.reopen(4, "validation/loss")
    assert [json.loads(line)["step"] for line in (folder / SAMPLES).open()] == list(range(4))
    rows = [json.loads(line) for line in (folder / METRICS).open()]
    assert [row["step"] for row in rows] == list(range(5))  # a kill now loses nothing

    async def measured() -> dict[str, float]:
        return {"validation/loss": 0.5, "loss/total": -1.0}  # the second is none of the step

    monkeypatch.setattr(Runtime, "current", lambda: SimpleNamespace(drain_metrics=measured))
    asyncio.run(run.report(4))
    again = [json.loads(line) for line in (folder / METRICS).open()]
    assert again[:4] == rows[:4] and len(again) == 5
    assert (again[4]["step"], again[4]["loss/total"], again[4]["validation/loss"]) == (4, 4.0, 0.5)
    run.close()
