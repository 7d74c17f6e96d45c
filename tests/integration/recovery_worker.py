"""One rank of a trainer as test_trainer_recovery runs it: a process that may be killed anywhere."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import forge.actors.trainer.learner  # noqa: F401 - so that processes forked from one that has it start at once
from forge.actors.trainer import TitanTrainer
from forge.controller.call import serving
from forge.controller.journal import Journal
from forge.errors import ForgeError
from tests.integration.folder_store import FolderStore
from tests.integration.trainer_cases import Result, WeightedLogprobs, batch_of, completion_groups

# What the caller asks for, in order: batches and versions are numbered.
CALLS: list[tuple[str, int | None]] = [
    ("train_step", 0),
    ("forward_backward", 1),
    ("forward_backward", 2),
    ("optim_step", None),
    ("broken_step", 3),
    ("train_step", 4),
    ("push_weights", 1),
    ("optim_step", None),  # there is nothing to update with
    ("forward_backward", 5),
    ("broken_step", 6),  # drops what was gathered
    *(("train_step", i) for i in range(7, 14)),
    ("push_weights", 2),
    ("export", None),
]


class Wandering(WeightedLogprobs):
    """A loss with a state, which draws random numbers."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.factor = 1.0

    def from_logprobs(self, *args: Tensor) -> Result:
        loss, metrics = super().from_logprobs(*args)
        self.num_calls += 1
        return self.factor * loss * torch.rand(()) / self.num_calls, {**metrics, "loss": loss.detach()}

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.factor = 1 + self.factor * abs(metrics["loss"]) / metrics["num_tokens"]

    def state_dict(self) -> dict[str, Any]:
        return {"num_calls": self.num_calls, "factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_calls, self.factor = state["num_calls"], state["factor"]


@dataclass(frozen=True)
class Life:
    """What a process is told at its start."""

    model: Path
    folder: Path  # outlives it
    rank: int
    world_size: int
    port: int
    first_call: int  # those before have been answered by all ranks
    dies_at: tuple[str, str, int] | None = None  # audit event, part of a path, how often in this life

    @property
    def answers(self) -> Path:
        return self.folder / f"answers{self.rank}"


def live(life: Life) -> None:
    """Answers the calls that are left; then writes down what the trainer has become."""
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": life.port, "RANK": life.rank}
    address |= {"LOCAL_RANK": life.rank, "WORLD_SIZE": life.world_size}
    os.environ.update({name: str(value) for name, value in address.items()})
    if life.dies_at is not None:
        die_at(*life.dies_at, life.folder)
    asyncio.run(_answer_calls(life))


def die_at(event: str, part: str, count: int, folder: Path) -> None:
    """Kills this process right before it does something to a file for the n-th time."""
    left = count

    def hook(name: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if name == event and str(args[0]).startswith(str(folder)) and part in str(args[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


async def _answer_calls(life: Life) -> None:
    FolderStore(life.folder / "stored").install()
    trainer = TitanTrainer.__new__(TitanTrainer)
    trainer.rank, trainer.world_size, trainer.state_dir = life.rank, life.world_size, life.folder / "state"
    trainer.__init__(
        life.model,
        Wandering(),
        optimizer={"lr": 1e-2},
        lr_scheduler={"warmup_steps": 8},
        training={
            "seq_len": 64,
            "dtype": "float32",
            "snapshot_every": 2,
        },
    )
    await trainer.setup()
    await trainer.catch_up()
    answers = Journal(life.answers)
    for number in range(life.first_call, len(CALLS)):
        with serving(f"call {number}"):
            answers.append((number, await _call(trainer, *CALLS[number], life.folder / "exported")))
    learner = trainer.learner
    torch.save((learner.facts(), learner.tensors()), life.folder / f"final{life.rank}")
    await trainer.teardown()
    if dist.is_initialized():
        dist.destroy_process_group()


async def _call(trainer: TitanTrainer, method: str, number: int | None, exported: Path) -> object:
    if method == "export":
        return await trainer.export(str(exported))
    if method == "push_weights":
        assert number is not None
        return await trainer.push_weights(number)
    batches: list[Any] = []
    if number is not None:
        dp_size = trainer.learner.model.job.dp_size
        made = [batch_of(completion_groups(10 * number + i), 6 * i) for i in range(dp_size)]
        if method == "broken_step":
            made[-1][1].advantages[0] = torch.nan
        batches = [[inputs for inputs, _ in made], [targets for _, targets in made]]
    try:
        answer = await getattr(trainer, method.replace("broken", "train"))(*batches)
        return repr(answer)  # NaN, the loss of a broken step, equals nothing
    except ForgeError as error:
        return str(error)
