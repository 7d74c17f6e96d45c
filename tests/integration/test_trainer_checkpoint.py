"""A run that is killed and started again goes on from its checkpoint as if it had never been killed."""

import asyncio
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
import torch

from forge.actors.trainer import TitanTrainer
from forge.controller.journal import Journal
from forge.data_models import Progress
from forge.errors import ActorFailure, ForgeError
from tests.integration.checkpoint_worker import Life, batches_of, live, start
from tests.integration.trainer_cases import WeightedLogprobs
from tests.unit.actors.test_trainer_recovery import files_up_to

TIMEOUT_S = 60
STEPS = 8
FSDP = {"data_parallel_shard_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2}
KILLS = {  # audit event, part of a path, how often in that life: where rank 0 dies
    "as it begins to write": ("open", ".distcp", 1),
    "written, but not complete": ("os.rename", ".metadata.tmp", 1),
    "complete, but not in its place": ("os.rename", ".partial", 2),
    "about to delete an old one": ("shutil.rmtree", ".partial", 2),  # the first is what the kill before left
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
    begun = Life(tiny_qwen3, tmp_path / "curve", 4, options, FSDP, 2, WeightedLogprobs())
    killed_and_resumed(begun, list(KILLS.values())[1:2])
    for name, parallelism in {"one process": {}, "tensor": TENSOR, "pipeline": PIPELINE}.items():
        options = {"folder": str(shutil.copytree(tmp_path / "saved", tmp_path / name)), "interval": 0}
        curve = Path(shutil.copy(begun.curve, tmp_path / f"{name}.curve"))
        life = Life(tiny_qwen3, curve, 6, options, parallelism, 2 if parallelism else 1, begun.loss)
        assert run(life)
        assert_follows(life, undisturbed(life.loss), tolerance=1e-5)


def test_two_ranks_resume_what_one_has_begun(
    tiny_qwen3: Path, tmp_path: Path, undisturbed: Callable[[Any], Curve]
) -> None:
    options = {"folder": str(tmp_path / "saved"), "interval": 2}
    life = Life(tiny_qwen3, tmp_path / "curve", 2, options, loss=WeightedLogprobs())
    assert run(life)
    life = replace(life, steps=4, parallelism=FSDP, world_size=2)
    assert run(life)
    assert_follows(life, undisturbed(life.loss), tolerance=1e-5)


def test_what_fails_on_one_rank_is_tried_again_and_then_raised_on_all(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    options = {"folder": str(tmp_path / "saved"), "interval": 1}
    life = Life(tiny_qwen3, tmp_path / "curve", 6, options, FSDP, 2, fails_at=(1, 3, 4))
    assert run(life)
    assert [step for step, _ in curve_of(life)] == [0, 1, 2]
    for rank in (0, 1):
        told = (tmp_path / f"error{rank}").read_text()
        assert told.startswith("step 3: the checkpoint ") and "step-4 could not be written: the file" in told
    assert os.listdir(tmp_path / "saved") == ["step-2"]


def test_options_of_the_optimizer_win_over_the_checkpoint(tiny_qwen3: Path, tmp_path: Path) -> None:
    life = Life(tiny_qwen3, tmp_path / "curve", STEPS, {"folder": str(tmp_path / "saved"), "interval": 1})
    other = {"name": "Adam", "lr": 1e-3, "weight_decay": 0.3, "betas": [0.5, 0.6], "eps": 1e-4}

    async def main() -> None:
        trainer = await start(life)
        await train(trainer, 2)
        await trainer.teardown()
        resumed = await start(life, optimizer=other)
        [optimizer] = resumed.learner.update.optimizers
        [group] = optimizer.param_groups
        assert (group["weight_decay"], group["betas"], group["eps"]) == (0.3, (0.5, 0.6), 1e-4)
        assert group["decoupled_weight_decay"] is False
        assert group["lr"] == pytest.approx(1e-3 * 3 / 5)  # the third step of five to warm up
        [parameter, *_] = group["params"]
        before, first = parameter.detach().clone(), optimizer.state[parameter]["exp_avg"].clone()
        await train(resumed, 1)
        assert not torch.equal(parameter, before) and first.abs().max() > 0
        await resumed.teardown()

    asyncio.run(main())


def test_a_replaced_trainer_repeats_from_what_the_run_started_from(
    tiny_qwen3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"folder": str(tmp_path / "saved"), "interval": 1, "keep_latest_k": 1}
    life = Life(tiny_qwen3, tmp_path / "curve", STEPS, options)

    async def main() -> None:
        first = await start(life)
        await train(first, 2)
        await first.teardown()
        resumed = await start(life, state_dir=tmp_path / "state")
        await train(resumed, 3)
        await resumed.save_checkpoint({"position": "elsewhere"})
        await first.teardown()
        assert sorted(os.listdir(tmp_path / "saved")) == ["step-2", "step-5"]

        replaced = await start(life, state_dir=tmp_path / "state")
        assert await replaced.progress() == Progress(5, {"position": "elsewhere"})
        tensors = zip(replaced.learner.tensors(), resumed.learner.tensors(), strict=True)
        assert all(torch.equal(*pair) for pair in tensors)

        shutil.rmtree(tmp_path / "saved/step-2")
        with pytest.raises(ActorFailure, match="this run started from .*step-2, which is gone"):
            await start(life, state_dir=tmp_path / "state")
        another_run = await start(life)
        assert await another_run.progress() == Progress(5, {"position": "elsewhere"})

    asyncio.run(main())


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    tiny_qwen3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = tmp_path / "saved"
    life = Life(tiny_qwen3, tmp_path / "curve", STEPS, {"folder": str(saved), "interval": 1})

    def damage(step: int) -> None:
        for path in (saved / f"step-{step}").glob("*.distcp"):
            os.truncate(path, path.stat().st_size // 2)

    async def main() -> None:
        trainer = await start(life)
        await train(trainer, 3)
        await trainer.teardown()
        damage(3)
        trainer = await start(life)
        assert (await trainer.progress()).num_steps == 2
        assert f"{saved / 'step-3'} is damaged: __0_0.distcp has " in caplog.text
        await train(trainer, 1)  # takes the name of the damaged one
        await trainer.teardown()
        assert sorted(os.listdir(saved)) == ["step-2", "step-3", "step-3.damaged"]
        damage(2)
        damage(3)
        for _ in range(2):
            with pytest.raises(ForgeError, match="every checkpoint in .* is damaged .step-3: .*; step-2: "):
                await start(life)

    asyncio.run(main())


def test_a_save_that_fails_behind_a_step_is_logged_at_once_and_tried_again(
    tiny_qwen3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(tiny_qwen3, tmp_path / "curve", STEPS, {"folder": str(tmp_path / "saved"), "interval": 1})

    async def main() -> None:
        trainer = await start(life)
        for _ in range(2):
            caplog.clear()
            with files_up_to(100_000):
                await train(trainer, 1)
                while "could not be written: rank 0: " not in caplog.text:
                    await asyncio.sleep(0.01)
            await train(trainer, 1)
        assert sorted(os.listdir(tmp_path / "saved")) == ["step-2", "step-4"]
        with files_up_to(100_000):
            await train(trainer, 1)
            with pytest.raises(ForgeError, match="step-6 could not be written: .*make room"):
                await train(trainer, 1)
        await train(trainer, 1)
        await trainer.teardown()
        assert sorted(os.listdir(tmp_path / "saved")) == ["step-4", "step-7"]

    asyncio.run(main())


def test_what_can_not_be_saved_is_told(tiny_qwen3: Path, tmp_path: Path) -> None:
    life = Life(tiny_qwen3, tmp_path / "curve", STEPS, {"folder": str(tmp_path / "saved"), "interval": 0})

    async def main() -> None:
        trainer = await start(replace(life, checkpoint={}))
        with pytest.raises(ForgeError, match="needs checkpoint.folder"):
            await trainer.save_checkpoint()
        trainer = await start(life)
        await trainer.save_checkpoint()  # there is nothing yet
        with pytest.raises(ForgeError, match="versions of the weights count from 1, got 0"):
            await trainer.push_weights(0)
        await trainer.forward_backward(*batches_of(0, 1))
        with pytest.raises(ForgeError, match="between forward_backward and optim_step"):
            await trainer.save_checkpoint()
        await train(trainer, 1)
        with (
            files_up_to(100_000),
            pytest.raises(ForgeError, match="step-1 could not be written: .*make room"),
        ):
            await trainer.save_checkpoint()
        assert (await trainer.train_step(*batches_of(1, 1))).metrics["lr"] > 0
        await trainer.save_checkpoint()
        assert os.listdir(tmp_path / "saved") == ["step-2"]
        at_once = {"folder": str(tmp_path / "at_once"), "interval": 0, "async_mode": "disabled"}
        trainer = await start(replace(life, checkpoint=at_once))
        await train(trainer, 1)
        with files_up_to(100_000), pytest.raises(ForgeError, match="step-1 could not be written"):
            await trainer.save_checkpoint()
        await trainer.save_checkpoint()  # of the same step, once there is room
        assert os.listdir(tmp_path / "at_once") == ["step-1"]

    asyncio.run(main())


async def train(trainer: TitanTrainer, num_steps: int) -> None:
    for _ in range(num_steps):
        step = (await trainer.progress()).num_steps
        await trainer.train_step(*batches_of(step, 1), state={"position": step + 1})
