"""What a checkpoint has beside the trainer's, and what a run that goes on from it is given."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from apps.grpo.config import load_config
from apps.grpo.saving import Saves
from forge.controller import Runtime
from forge.observability import metrics, record
from tests.unit.rl.test_weight_sync import handle


class World:
    """Machines that remember what they are told."""

    def __init__(self, committed: dict[str, Any] | None = None) -> None:
        self.committed = committed or {}
        self.loaded: list[Any] = []

    async def state_dict(self) -> dict[str, Any]:
        return {"number": 7}

    async def load_state_dict(self, state: Any) -> None:
        self.loaded.append(state)

    async def save_checkpoint(self, state: dict[str, Any], *, wait: bool) -> None:
        self.committed = state

    async def progress(self) -> Any:
        return SimpleNamespace(state=self.committed, num_steps=self.committed.get("num_updates", 0))

    def saves(self, folder: Path) -> Saves:
        part = handle(state_dict=self.state_dict, load_state_dict=self.load_state_dict)
        trainer = handle(save_checkpoint=self.save_checkpoint, progress=self.progress)
        m = SimpleNamespace(
            buffer=part,
            dataset=part,
            trainer=trainer,
            state_dict=lambda: {"algorithm": 1},
            load_state_dict=self.loaded.append,
        )
        return Saves(cast(Any, m), load_config([]).config, folder, self.committed)


def test_what_was_recorded_before_a_stop_is_in_the_next_row_and_in_the_state(
    tmp_path: Path, monkeypatch: Any
) -> None:
    async def scenario() -> None:
        runtime = cast(Any, SimpleNamespace(services={}))
        runtime.recorded = lambda: Runtime.recorded(runtime)
        runtime._drain = lambda: Runtime._drain(runtime)
        monkeypatch.setattr(Runtime, "current", lambda: runtime)
        metrics.drain()
        record("reward", mean=1.0, num_groups=1)
        record("reward", mean=0.0, num_groups=1)
        stopped = World()
        await stopped.saves(tmp_path).save(3)
        assert metrics.merge([metrics.drain()]) == {"reward/mean": 0.5, "reward/num_groups": 2}

        resumed = World(stopped.committed)
        metrics.put_back(await resumed.saves(tmp_path).restore())
        record("reward", mean=0.2, num_groups=1)
        row = metrics.merge([metrics.drain()])
        assert abs(row["reward/mean"] - 1.2 / 3) < 1e-12 and row["reward/num_groups"] == 3
        assert [state.get("number") for state in resumed.loaded] == [7, 7, None]

    asyncio.run(scenario())
