"""What a step of the GRPO loop asks of its machines; these only note it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from apps.grpo.config import load_config
from apps.grpo.loop import Loop
from forge.data_models import Completion
from forge.grace import StopRequest
from tests.unit.rl.test_weight_sync import handle


def loop_of(*argv: str, folder: Path = Path(), is_colocated: bool = False, **parts: Any) -> Loop:
    """A loop with these parts of its machines, and a sync that notes what is pushed in `pushed`."""
    pushed: list[tuple[int, bool, bool]] = []

    async def push(step: int, batch: object, *, must: bool, wait: bool) -> None:
        pushed.append((step, must, wait))

    return Loop(
        cast(Any, SimpleNamespace(colocation=SimpleNamespace(is_on=is_colocated), **parts)),
        load_config(list(argv)).config,
        cast(Any, SimpleNamespace(folder=folder, doing=lambda *_: None)),
        cast(Any, SimpleNamespace(push=push, pushed=pushed)),
        saves=cast(Any, None),
        stop=StopRequest(),
    )


@pytest.mark.parametrize("is_colocated", [False, True])
def test_what_is_evaluated_is_on_the_generators_and_on_shared_devices_nothing_is_loaded_beside_a_step(
    is_colocated: bool,
) -> None:
    keys = ("training.sync_interval=2", "max_policy_age=2", "steps=5", "evaluation.every=3")
    loop = loop_of(*keys, is_colocated=is_colocated)
    for step in range(1, 6):
        asyncio.run(loop.push([], step))
    is_evaluated = {1: False, 2: False, 3: True, 4: False, 5: True}
    expected = [(step, it_is, it_is or is_colocated) for step, it_is in is_evaluated.items()]
    assert cast(Any, loop.sync).pushed == expected


def test_each_evaluation_of_a_run_asks_with_the_same_seeds(tmp_path: Path) -> None:
    seeds: list[int] = []

    async def generate(prompt: str, *, seed: int, **sampling: Any) -> list[Completion]:
        seeds.append(seed)
        return [Completion(prompt, torch.zeros(1, dtype=torch.int64), torch.zeros(1), generator_version=0)]

    async def grade(**answer: str) -> float:
        return 0.0

    async def held_out() -> list[Any]:
        return [{"request": text, "target": "1"} for text in "abc"]

    async def export(folder: str) -> None:
        Path(folder).mkdir()

    parts = {
        "policy": handle(generate=generate),
        "reward": handle(grade_response=grade),
        "dataset": handle(held_out=held_out),
        "trainer": handle(export=export),
    }
    loop = loop_of("evaluation.every=1", "evaluation.n_samples=1", folder=tmp_path, **parts)
    for step in (0, 1):
        asyncio.run(loop.evaluate(step))
    assert seeds[:3] == seeds[3:] and len(set(seeds)) == 3
