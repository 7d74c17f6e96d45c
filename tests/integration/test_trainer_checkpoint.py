"""A run that is killed and started again goes on from its checkpoint as if it had never been killed."""

import multiprocessing
import random
import socket
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from forge.controller.journal import Journal
from tests.integration.checkpoint_worker import Life, live

TIMEOUT_S = 60
STEPS = 8
FSDP = {"data_parallel_shard_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}
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
def undisturbed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """The losses of one process that saved nothing."""
    life = Life(tiny_llama, tmp_path_factory.mktemp("undisturbed") / "curve", STEPS)
    assert run(life)
    return dict(curve_of(life))


def assert_follows(life: Life, undisturbed: Curve, tolerance: float) -> None:
    """Every step was made, and whenever it was made, again or not, it had the loss of the undisturbed run."""
    curve = curve_of(life)
    assert {step for step, _ in curve} == set(range(life.steps))
    for step, loss in curve:
        assert abs(loss - undisturbed[step]) <= tolerance, f"step {step}"


def killed_and_resumed(life: Life) -> int:
    """Lives until the run is finished; each place of KILLS and one random moment end one."""
    lives = [replace(life, dies_at=place) for place in KILLS.values()]
    lives.insert(1, replace(life, dies_after_s=(random.randint(1, 2), random.uniform(0, 0.05))))
    num_killed = sum(not run(each) for each in lives)
    assert run(life)
    return num_killed


def test_killed_at_any_moment_the_loss_curve_is_that_of_the_undisturbed_run(
    tiny_llama: Path, tmp_path: Path, undisturbed: Curve
) -> None:
    options = {"folder": str(tmp_path / "checkpoints"), "interval": 1}
    life = Life(tiny_llama, tmp_path / "curve", STEPS, options)
    assert killed_and_resumed(life) == len(KILLS) + 1
    assert_follows(life, undisturbed, tolerance=0.0)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{STEPS - 1}", f"step-{STEPS}"]
