"""`forge COMMAND`: which run it takes, and what it says when there is none or more than one."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge import cli
from forge.controller import Runtime, run_folder
from forge.controller.witness import start_witness
from forge.errors import ConfigError


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_folder, "run_base", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def this_run(base: Path) -> Iterator[int]:
    """A live run whose root is this process."""
    witness = start_witness(base / str(os.getpid()), None)
    yield os.getpid()
    witness.close()


@pytest.fixture
def stuck_run(base: Path) -> Iterator[int]:
    """One whose root, the parent of this process, listens and never answers."""
    folder = base / str(os.getppid())
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / f"{os.getppid()}.sock"))
        listener.listen()
        yield os.getppid()


def test_the_only_run_needs_no_name(this_run: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["why"]) == 0
    assert capsys.readouterr().out.endswith("no call is outstanding\n")


def test_no_run_is_one_line_and_an_exit_code(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base / "4194305").mkdir()  # a run that was killed: no process has this number
    (base / "4194305" / "4194305.sock").touch()
    assert cli.main(["why"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith("no live run of this user")


def test_of_several_runs_one_must_be_named(
    this_run: int, stuck_run: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["why"]) == 1
    told = capsys.readouterr().err
    assert f"{this_run} (" in told and f"{stuck_run} (" in told and Path(sys.executable).name in told
    assert cli.main(["why", str(this_run)]) == 0


def test_a_run_is_found_by_any_of_its_processes(
    base: Path, this_run: int, stuck_run: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (base / str(this_run) / "4194305.sock").touch()
    assert cli.main(["why", "4194305"]) == 0
    assert cli.main(["why", "1"]) == (0 if stuck_run == 1 else 1)


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([])
    assert "COMMAND" in capsys.readouterr().err


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `forge replay` asks for; nothing is done."""
    seen: list[Any] = []

    def replay_step(folder: Path, step: int, *, num_tokens: int, json_file: Path | None) -> None:
        seen.append((folder, step, num_tokens, json_file))
        if step < 1:
            raise ConfigError("step 0 is not recorded")

    monkeypatch.setitem(sys.modules, "apps.grpo.replay_step", SimpleNamespace(replay_step=replay_step))
    monkeypatch.setattr(Runtime, "leave", lambda: None)  # for good, which other tests would not like
    return seen


def test_replay_takes_a_run_and_a_step(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", "--run", "some/run", "--step", "3", "--json", "all.json"]) == 0
    assert cli.main(["replay", "--run", "some/run", "--step", "0", "--tokens", "5"]) == 2
    assert asked == [(Path("some/run"), 3, 100, Path("all.json")), (Path("some/run"), 0, 5, None)]
    assert capsys.readouterr().err == "error: step 0 is not recorded\n"
