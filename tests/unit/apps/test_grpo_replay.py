"""Training on a record: which steps there are, and by which numbers they go."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from apps.grpo import replay
from apps.grpo.config import load_config
from apps.grpo.replay_step import steps_between
from forge.rl import record
from forge.rl.record import Recorded
from tests.unit.rl.test_record import episode
from tests.unit.rl.test_weight_sync import handle


def test_steps_go_by_the_numbers_of_the_record_wherever_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints and `forge replay` find them by these."""
    for step in range(51, 55):
        record.write(tmp_path / "episodes", step, [episode(step)], version=step - 1)
    learnt, reported, saved = [], [], []

    async def save_checkpoint(state: dict[str, int], *, wait: bool) -> None:
        saved.append(state["step"])

    async def export(folder: str) -> None:
        pass

    async def start(*_: object) -> Any:
        return handle(save_checkpoint=save_checkpoint, export=export)

    async def learn(trainer: object, config: object, each: Recorded) -> None:
        learnt.append(each.step)

    async def report(step: int) -> None:
        reported.append(step)

    monkeypatch.setattr(replay, "start_only_trainer", start)
    monkeypatch.setattr(replay, "learn", learn)
    config = load_config([f"replay={tmp_path}", "steps=3", "checkpoint.interval=2"]).config
    expected: list[int] = []
    run = SimpleNamespace(folder=tmp_path, started=lambda *, steps: expected.append(steps), report=report)
    asyncio.run(replay.replay(config, cast(Any, run)))
    assert learnt == reported == [51, 52, 53] and expected == [53] and saved == [52]
    assert (
        steps_between(config, tmp_path, 0, 53) == [51, 52] and steps_between(config, tmp_path, 52, 53) == []
    )
    one_file = tmp_path / "episodes/step-000054.pt"
    assert record.steps(one_file) == [54] and record.read_step(one_file, 54).step == 54
    own = load_config([]).config  # a run that made the record itself has done all steps before it
    assert steps_between(own, tmp_path, 50, 53) == [51, 52] and steps_between(own, tmp_path, 0, 2) == [1]
