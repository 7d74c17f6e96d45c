"""What is left to do for a run that is resumed after its last step."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from apps.grpo import finish
from apps.grpo.config import load_config
from apps.grpo.resume import ResumePoint
from forge.app import METRICS
from tests.unit.rl.test_weight_sync import handle

POINT = ResumePoint({"step": 5, "sha256": "b"}, num_updates=10)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that a trainer, started for it, wrote its model to."""
    folders: list[str] = []

    async def export(folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)
        folders.append(folder)

    async def start_trainer(*args: Any) -> Any:
        assert args[-1] == POINT.num_updates
        return handle(export=export)

    monkeypatch.setattr(finish, "start_trainer", start_trainer)
    monkeypatch.setattr(finish, "fetch_models", lambda config: ("", ""))
    return folders


def is_over(folder: Path, *argv: str) -> bool:
    config = load_config(["steps=5", *argv]).config
    return asyncio.run(finish.is_over(config, cast(Any, SimpleNamespace(folder=folder)), POINT))


def test_the_model_of_fewer_steps_is_not_that_of_a_run_that_went_further(
    tmp_path: Path, exported: list[str]
) -> None:
    asyncio.run(finish.export(handle(export=_nothing), tmp_path, {"step": 3, "sha256": "a"}))
    assert is_over(tmp_path, "evaluation.every=0")
    assert exported == [str(tmp_path / "model")]
    assert is_over(tmp_path, "evaluation.every=0") and len(exported) == 1
    assert not is_over(tmp_path, "evaluation.every=0", "steps=6")


def test_a_run_that_was_stopped_in_its_last_evaluation_is_not_over(
    tmp_path: Path, exported: list[str]
) -> None:
    row = {"step": 5, "loss/total": 1.0}
    (tmp_path / METRICS).write_text(json.dumps(row) + "\n")
    assert not is_over(tmp_path, "evaluation.every=5") and not exported
    assert is_over(tmp_path, "evaluation.every=5", "steps=4")  # it went further than it is to go
    (tmp_path / METRICS).write_text(json.dumps({**row, "evaluation/version": 5.0}) + "\n")
    assert is_over(tmp_path, "evaluation.every=5")


async def _nothing(folder: str) -> None:
    Path(folder).mkdir()
