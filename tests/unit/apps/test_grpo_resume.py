"""Where a GRPO run goes on: from the checkpoint that is whole with its loop, and as the same run."""

import io
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp

from apps.grpo.actors import start_trainer
from apps.grpo.config import GRPOConfig, load_config
from apps.grpo.resume import ResumePoint, newest_saved, refuse_changes, resume_point
from forge.actors.trainer import TitanTrainer
from forge.actors.trainer.checkpoint_options import CheckpointOptions
from forge.config import describe
from forge.errors import ConfigError, ForgeError
from forge.rl.saved_loop import LoopFolder
from forge.runs import CONFIG


def config_of(*argv: str) -> GRPOConfig:
    return load_config(list(argv)).config


def write_checkpoint(checkpoints: Path, step: int) -> dict[str, Any]:
    """As the trainer leaves one, with the file that it names."""
    named = LoopFolder(checkpoints / "loop").write(step, step, {"buffer": {"number": 10 * step}})
    facts = io.BytesIO()
    torch.save({"num_steps": step, "state": named}, facts)
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        dcp.save(
            {"facts": {"rank0": facts.getvalue()}, "w": torch.ones(8)},
            checkpoint_id=checkpoints / f"step-{step}",
            no_dist=True,
        )
    return named


def test_the_newest_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    assert newest_saved(tmp_path) == ResumePoint({}, 0)
    write_checkpoint(tmp_path, 2)
    named = write_checkpoint(tmp_path, 10)
    (tmp_path / "step-12.partial").mkdir()  # killed before its commit
    LoopFolder(tmp_path / "loop").write(12, 12, {"buffer": {}})
    assert newest_saved(tmp_path) == ResumePoint(named, 10)
    assert LoopFolder(tmp_path / "loop").read(named) == {"buffer": {"number": 100}}


@pytest.mark.parametrize("how", ["torn", "gone", "another's", "trainer's", "zeros"])
def test_one_that_is_not_whole_is_told_and_the_one_before_it_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    first = write_checkpoint(tmp_path, 2)
    write_checkpoint(tmp_path, 4)
    file = tmp_path / "loop/step-4-updates-4.pt"
    match how:
        case "torn":
            file.write_bytes(file.read_bytes()[:-1])
        case "gone":
            file.unlink()
        case "another's":  # that was killed before the trainer's own was complete
            LoopFolder(tmp_path / "loop").write(4, 4, {"buffer": {"number": 41}})
        case "zeros":  # as a machine that went down leaves them
            file = tmp_path / "step-4/__0_0.distcp"
            file.write_bytes(bytes(file.stat().st_size))
        case _:
            file = tmp_path / "step-4/__0_0.distcp"
            file.write_bytes(file.read_bytes()[:-1])
    assert newest_saved(tmp_path) == ResumePoint(first, 2)
    assert "step-4 can't be gone on from" in caplog.text
    assert (file.name if how != "zeros" else "its state can't be read") in caplog.text
    assert not (tmp_path / "step-4").exists() and (tmp_path / "step-4.damaged").exists()
    (tmp_path / "loop/step-2-updates-2.pt").unlink()
    with pytest.raises(
        ForgeError, match=r"no checkpoint .* can be gone on from .*step-2-updates-2\.pt is missing"
    ):
        newest_saved(tmp_path)


def test_files_of_the_loop_stay_as_long_as_a_checkpoint_may_name_them(tmp_path: Path) -> None:
    def names() -> set[str]:
        return {path.name.removesuffix(".pt").replace("-updates-", "/")[5:] for path in tmp_path.iterdir()}

    loops = LoopFolder(tmp_path)
    for step, num_updates in ((2, 2), (9, 9), (10, 9), (11, 9), (12, 9), (13, 10)):  # 10 to 12: skipped
        loops.write(step, num_updates, {})
    loops.purge([])
    loops.purge([2, 9])  # the newest is not complete yet
    assert names() == {"2/2", "9/9", "10/9", "11/9", "12/9", "13/10"}
    loops.purge([9, 10])
    assert names() == {"9/9", "10/9", "11/9", "12/9", "13/10"}
    (tmp_path / "step-13-updates-10.new").touch()
    loops.rewind(9)
    assert names() == {"9/9"}


def test_the_trainer_takes_that_checkpoint_whatever_an_earlier_one_still_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    started = SimpleNamespace(as_actor=lambda **sections: given.update(sections))
    monkeypatch.setattr(TitanTrainer, "options", lambda **where: started)
    config = config_of()
    for load_step in (0, None):
        start_trainer(config, config.algorithm(), "model", tmp_path, load_step)
        assert CheckpointOptions(**given["checkpoint"]).load_step == load_step


def test_what_makes_it_another_run_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(describe(config_of()))
    same = ("--steps", "500", "--trainer.procs", "2", "--training.learning_rate", "1e-3", "--record", "true")
    refuse_changes(config_of(*same, "--checks.ratio", "off"), tmp_path)
    refuse_changes(config_of("--resume"), tmp_path)
    with pytest.raises(ConfigError) as caught:
        refuse_changes(config_of("--training.batch_size", "16", "--loss", "dapo", "--seed", "1"), tmp_path)
    told = str(caught.value)
    assert "training.batch_size 8 (now 16)" in told and "seed 0 (now 1)" in told and "loss" in told
    with pytest.raises(ConfigError, match=r"services\.ref_model .* \(now None\)"):
        refuse_changes(config_of("--ref_model", "null", "--grpo.beta", "0"), tmp_path)
    run = cast(Any, SimpleNamespace(resumed=True, folder=tmp_path))
    with pytest.raises(ConfigError, match=r"training\.lora None \(now LoRAOptions"):
        resume_point(config_of("--training.lora.rank", "4"), run)


def test_evaluations_may_be_more_or_fewer_and_the_limit_of_ages_higher_but_no_more_than_that(
    tmp_path: Path,
) -> None:
    """What is held out is no row of the training data, so that numbers name other questions without it; and
    what waits already may be as old as the limit was."""
    (tmp_path / CONFIG).write_text(describe(config_of("evaluation.every=5", "staleness.limit=4")))
    refuse_changes(config_of("evaluation.every=7", "staleness.limit=6"), tmp_path)
    for key, was, now in (("evaluation.every", 5, 0), ("staleness.limit", 4, 3)):
        changed = {"evaluation.every": 5, "staleness.limit": 4, key: now}
        with pytest.raises(ConfigError, match=rf"{key} {was} \(now {now}\)"):
            refuse_changes(config_of(*(f"{name}={value}" for name, value in changed.items())), tmp_path)
    (tmp_path / CONFIG).write_text(describe(config_of("evaluation.every=0")))
    with pytest.raises(ConfigError, match=r"evaluation.every 0 \(now 5\)"):
        refuse_changes(config_of("evaluation.every=5"), tmp_path)
