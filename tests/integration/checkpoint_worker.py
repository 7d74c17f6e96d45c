"""One rank of a training run as test_trainer_checkpoint runs it: a process that may be killed anywhere."""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import forge.actors.trainer.checkpoint  # noqa: F401 - so that processes forked from one that has it start at once
from forge.actors.trainer import TitanTrainer
from forge.controller.journal import Journal
from forge.data_models import TrainInputs, TrainTargets
from forge.errors import ForgeError
from tests.integration.recovery_worker import Wandering, die_at
from tests.integration.trainer_cases import batch_of, completion_groups

LENGTHS = ((3, 7, 1), (5,), (2, 9), (4, 4))  # completions of each prompt
CUT = 1  # with two data-parallel ranks the first has this many prompts


@dataclass(frozen=True)
class Life:
    """What the processes of a run are told at their start."""

    model: Path
    curve: Path  # a journal of (step, loss)
    steps: int  # the run ends after so many
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    parallelism: Mapping[str, int] = field(default_factory=dict)
    world_size: int = 1
    loss: Any = field(default_factory=Wandering)
    dies_at: tuple[str, str, int] | None = None  # audit event, part of a path, how often in this life
    fails_at: tuple[
        int, ...
    ] = ()  # checkpoints of this life, by number, that rank 0 can't put in their place
    dies_after_s: tuple[int, float] | None = None  # so many steps of this life, and seconds after the last


def live(life: Life, rank: int, port: int) -> None:
    """Trains up to the last step, from the newest checkpoint if there is one."""
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank}
    address |= {"LOCAL_RANK": rank, "WORLD_SIZE": life.world_size}
    os.environ.update({name: str(value) for name, value in address.items()})
    if life.dies_at is not None and rank == 0:
        die_at(*life.dies_at, Path(life.checkpoint["folder"]))
    if life.fails_at and rank == 0:
        _fail_at(life.fails_at)
    asyncio.run(_train(life, rank))


def _fail_at(numbers: tuple[int, ...]) -> None:
    left = itertools.count(1)

    def hook(name: str, args: tuple[Any, ...]) -> None:
        if name == "os.rename" and str(args[0]).endswith(".partial") and next(left) in numbers:
            raise OSError("the file system is read-only")

    sys.addaudithook(hook)


async def start(
    life: Life, rank: int = 0, *, state_dir: Path | None = None, optimizer: Mapping[str, Any] | None = None
) -> TitanTrainer:
    """The trainer of a run, caught up."""
    trainer = TitanTrainer.__new__(TitanTrainer)
    trainer.rank, trainer.world_size, trainer.state_dir = rank, life.world_size, state_dir
    trainer.__init__(
        life.model,
        life.loss,
        optimizer=optimizer or {"lr": 1e-2, "weight_decay": 0.1},
        lr_scheduler={"warmup_steps": 5},
        training={"seq_len": 64, "dtype": "float32"},
        parallelism=life.parallelism,
        checkpoint=life.checkpoint,
    )
    await trainer.setup()
    await trainer.catch_up()
    return trainer


async def _train(life: Life, rank: int) -> None:
    trainer = await start(life, rank)
    curve = Journal(life.curve) if rank == 0 else None
    progress = await trainer.progress()
    first = progress.num_steps
    assert progress.state == ({"position": first} if first else {})
    for step in range(first, life.steps):
        batches = batches_of(step, trainer.learner.model.job.dp_size)
        try:
            result = await trainer.train_step(*batches, state={"position": step + 1})
        except ForgeError as error:
            life.curve.with_name(f"error{rank}").write_text(f"step {step}: {error}")
            break
        if curve is not None:
            curve.append((step, result.loss))
            if life.dies_after_s is not None and step - first + 1 == life.dies_after_s[0]:
                signal.setitimer(signal.ITIMER_REAL, life.dies_after_s[1] + 1e-6)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process at once, as a kill does
    await trainer.teardown()
    if dist.is_initialized():
        dist.destroy_process_group()


def batches_of(step: int, dp_size: int) -> tuple[list[TrainInputs], list[TrainTargets]]:
    """The same episodes for one rank or shared out over two, unevenly."""
    groups = completion_groups(seed=step, lengths=LENGTHS)
    parts = [groups] if dp_size == 1 else [groups[:CUT], groups[CUT:]]
    first = [0, sum(len(group) for group in groups[:CUT])]
    made = [batch_of(part, number) for part, number in zip(parts, first, strict=False)]
    return [inputs for inputs, _ in made], [targets for _, targets in made]
