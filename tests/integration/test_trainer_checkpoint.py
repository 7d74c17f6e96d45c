"""A run that is killed and started again goes on from its checkpoint as if it had never been killed."""

import multiprocessing
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from forge.controller.journal import Journal
from tests.integration.checkpoint_worker import Life, live
from tests.integration.trainer_cases import WeightedLogprobs

TIMEOUT_S = 60
STEPS = 8
FSDP = {"data_parallel_shard_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2}
KILLS = {  # audit event, part of a path, how often in that life: where rank 0 dies
    "as it begins to write": ("open", ".distcp", 1),
    "written, but not complete": ("os.rename", ".metadata.tmp", 1),
    "complete, but not in its place": ("os.rename", ".partial", 2),
    "while an old one is deleted": ("os.rmdir", "step-", 1),
}
processes_of = multiprocessing.get_context("forkserver")
processes_of.set_forkserver_preload(["tests.integration.checkpoint_worker"])

Curve = dict[int, float]


def run(life: Life) -> bool:
    """One life; whether it was not killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: list[BaseProcess] = [
        processes_of.Process(target=live, args=[life, rank, port]) for rank in range(life.world_size)
    ]
    try:
        for process in ranks:
            process.start()
        running = list(ranks)
        while running:
            assert wait([p.sentinel for p in running], TIMEOUT_S), "a rank hangs"
            if any(p.exitcode is not None and p.exitcode < 0 for p in ranks):
                return False
            assert all(p.exitcode in (None, 0) for p in ranks), [p.exitcode for p in ranks]
            running = [p for p in running if p.exitcode is None]
        return True
    finally:
        for process in ranks:
            process.kill()
            process.join()


def curve_of(life: Life) -> list[tuple[int, float]]:
    """(step, loss) of all lives, in order."""
    return Journal(life.curve).records


@pytest.fixture(scope="module")
def undisturbed(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Curve]:
    """The losses of one process that saved nothing."""
    curves: dict[str, Curve] = {}

    def curve(loss: Any) -> Curve:
        name = type(loss).__name__
        if name not in curves:
            life = Life(tiny_qwen3, tmp_path_factory.mktemp("undisturbed") / "curve", STEPS, loss=loss)
            assert run(life)
            curves[name] = dict(curve_of(life))
        return curves[name]

    return curve


def assert_follows(life: Life, undisturbed: Curve, tolerance: float) -> None:
    """Every step was made, and whenever it was made, again or not, it had the loss of the undisturbed run."""
    curve = curve_of(life)
    assert {step for step, _ in curve} == set(range(life.steps))
    for step, loss in curve:
        assert abs(loss - undisturbed[step]) <= tolerance, f"step {step}"


def killed_and_resumed(life: Life, places: Iterable[tuple[str, str, int]]) -> None:
    """Lives until the run is finished, of which each place and a random moment end one."""
    lives = [replace(life, dies_at=place) for place in places]
    lives.insert(1, replace(life, dies_after_s=(random.randint(1, 2), random.uniform(0, 0.05))))
    for each in lives:
        assert not run(each), f"nobody died of {each}"
    assert run(life)


def test_killed_at_any_moment_the_loss_curve_is_that_of_the_undisturbed_run(
    tiny_qwen3: Path, tmp_path: Path, undisturbed: Callable[[Any], Curve]
) -> None:
    life = Life(tiny_qwen3, tmp_path / "curve", STEPS, {"folder": str(tmp_path / "saved"), "interval": 1})
    killed_and_resumed(life, KILLS.values())
    assert_follows(life, undisturbed(life.loss), tolerance=0.0)
    assert sorted(os.listdir(tmp_path / "saved")) == [f"step-{STEPS - 1}", f"step-{STEPS}"]


def test_two_killed_ranks_leave_a_checkpoint_that_any_layout_resumes(
    tiny_qwen3: Path, tmp_path: Path, undisturbed: Callable[[Any], Curve]
) -> None:
    options = {"folder": str(tmp_path / "saved"), "interval": 1}
    begun = Life(tiny_qwen3, tmp_path / "curve", 5, options, FSDP, 2, WeightedLogprobs())
    killed_and_resumed(begun, list(KILLS.values())[1:2])
    for name, parallelism in {"one process": {}, "tensor": TENSOR, "pipeline": PIPELINE}.items():
        options = {"folder": str(shutil.copytree(tmp_path / "saved", tmp_path / name)), "interval": 1}
        curve = Path(shutil.copy(begun.curve, tmp_path / f"{name}.curve"))
        life = Life(tiny_qwen3, curve, STEPS, options, parallelism, 2 if parallelism else 1, begun.loss)
        assert run(life)
        assert_follows(life, undisturbed(life.loss), tolerance=1e-5)


def test_two_ranks_resume_what_one_has_begun(
    tiny_qwen3: Path, tmp_path: Path, undisturbed: Callable[[Any], Curve]
) -> None:
    options = {"folder": str(tmp_path / "saved"), "interval": 2}
    life = Life(tiny_qwen3, tmp_path / "curve", 2, options, loss=WeightedLogprobs())
    assert run(life)
    life = replace(life, steps=STEPS, parallelism=FSDP, world_size=2)
    assert run(life)
    assert_follows(life, undisturbed(life.loss), tolerance=1e-5)
