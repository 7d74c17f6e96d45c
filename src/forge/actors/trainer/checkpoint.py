"""Checkpoints: all that the next step depends on, on the disk, for another run under any parallel layout.

Through torchtitan's CheckpointManager, which writes and reshards with torch.distributed.checkpoint (DCP).
"""

import io
import logging
import os
import time
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from forge.actors import _titan as titan
from forge.actors.trainer.agreement import from_rank_0
from forge.actors.trainer.checkpoint_folder import CheckpointFolder
from forge.actors.trainer.checkpoint_options import CheckpointOptions
from forge.actors.trainer.learner import Facts
from forge.actors.trainer.lora import is_adapter
from forge.actors.trainer.lora_options import LoRAOptions
from forge.actors.trainer.work import Standing
from forge.errors import ActorFailure, ConfigError, ForgeError

if TYPE_CHECKING:
    from forge.actors.trainer.learner import Learner

logger = logging.getLogger(__name__)

_FACTS = "facts"  # their key among the states of a checkpoint


class _RankFacts(Stateful):
    """One rank's facts among the states that DCP saves: each rank writes its own and may read another's."""

    def __init__(self, facts: Callable[[], dict[str, Any]], rank: int) -> None:
        self._facts = facts
        self.rank = rank
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, bytes]:
        file = io.BytesIO()
        torch.save(self._facts(), file)
        return {f"rank{self.rank}": file.getvalue()}

    def load_state_dict(self, state_dict: dict[str, bytes]) -> None:
        [stored] = state_dict.values()
        self.loaded = torch.load(io.BytesIO(stored), map_location="cpu", weights_only=False)


class Checkpoints:
    """One rank's part of saving and loading; every rank must make the same calls in the same order."""

    def __init__(self, learner: "Learner", options: CheckpointOptions, *, rank: int) -> None:
        assert options.folder is not None
        self._learner, self._options, self._rank = learner, options, rank
        self._standing = Standing()
        self._lora = _described(learner.model.lora)
        self._facts = _RankFacts(self._own_facts, rank)
        self._is_async = options.async_mode == "async"
        self._manager = titan.CheckpointManager.Config(
            enable=True,
            initial_load_model_only=False,  # the model's own weights are not its business
            keep_latest_k=0,  # it would count broken ones, and delete before the new one is complete
            async_mode="async" if self._is_async and dist.is_initialized() else "disabled",
        ).build(
            dataloader=None,
            model_parts=learner.model.parts,
            optimizers=learner.update.optimizers,
            lr_schedulers=learner.update.schedulers,
            states={_FACTS: self._facts},
            sd_adapter=None,
        )
        self.folder = CheckpointFolder(Path(options.folder).absolute())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[str | None] | None = None
        self._saved: tuple[int, Standing] | None = None  # the last, by its optimizer steps

    def is_due(self, step: int) -> bool:
        """Whether one is to be saved after so many optimizer steps."""
        return self._options.interval > 0 and step % self._options.interval == 0

    def base(self, note: Path | None) -> int:
        """The checkpoint to start from, as optimizer steps; 0: none.

        That which is written in the file `note`, else the newest that is complete and whole and not after
        `load_step`, which is then written there. Raises ActorFailure when the written one is gone, ForgeError
        when all are damaged.
        """
        return from_rank_0(lambda: self._base(note), self._rank)

    def load(self, step: int) -> Standing:
        """Model, optimizer, schedule, random numbers and loss become those of this checkpoint.

        The optimizer's options win over what it holds: learning rate, betas, eps, weight decay. Random
        numbers are exact under the number of processes that wrote it; otherwise they go on from rank 0's.
        Raises ConfigError where it is of other adapters.
        """
        start = time.monotonic()
        options = [_options_of(group) for group in self._param_groups()]
        # one rank's word: a shared file system may show the others what is gone
        keys = from_rank_0(lambda: set(self.folder.metadata(step).state_dict_metadata), self._rank)
        self._facts.rank = self._rank if f"{_FACTS}.rank{self._rank}" in keys else 0
        self._read(step, {_FACTS: self._facts})
        self._facts.rank = self._rank
        stored = self._facts.loaded
        self._check_lora(step, stored.get("lora"), stored.get("base"))
        self._read(step, self._tensors())
        for group, given in zip(self._param_groups(), options, strict=True):  # others than before
            group.update(given)
        self._learner.resume(Facts(*(stored[f.name] for f in fields(Facts))))
        if self._rank == 0:
            taken = time.monotonic() - start
            logger.info("%s was loaded in %.1f s", self.folder.of(step), taken)
        return Standing(*(stored[f.name] for f in fields(Standing)))

    def _read(self, step: int, states: dict[str, Any]) -> None:
        _expect_one_process()
        try:
            self._manager.dcp_load(
                states, checkpoint_id=str(self.folder.of(step)), from_hf=False, from_quantized=False
            )
        except CheckpointException as error:  # no Exception
            raise ForgeError(f"{self.folder.of(step)} can't be loaded: {_reason(error)}") from error

    def _check_lora(self, step: int, stored: dict[str, Any] | None, base: str | None) -> None:
        if stored != self._lora:
            was, now = ("null" if lora is None else lora for lora in (stored, self._lora))
            raise ConfigError(
                f"{self.folder.of(step)} was written with training.lora {was}, but it is {now}: set it as it "
                "was, or name another checkpoint.folder"
            )
        if base != self._learner.model.base:
            raise ConfigError(
                f"{self.folder.of(step)} holds adapters of another model than "
                f"{self._learner.model.source.name}: name the model that they were trained on, or another "
                "checkpoint.folder"
            )

    def save(self, standing: Standing, also_kept: Collection[int] = ()) -> None:
        """Begins to save; the next step may change everything once this has returned.

        also_kept: checkpoints that must not be deleted, however old. Does nothing before the first step, for
        what was saved last, and while a step is repeated of which a later checkpoint is complete. Where the
        one before could not be written, this one is waited for: raises ForgeError, on every rank, when it
        can't be written either.
        """
        step = self._learner.num_steps
        failed_before = self._failure() is not None
        is_saved = (step, standing) == self._saved and not failed_before
        if step == 0 or is_saved or not from_rank_0(lambda: self._begin(step), self._rank):
            return
        self._standing = standing  # which is written too
        self._saving = self._thread.submit(self._finish, step, self._write(step), also_kept)
        self._saved = (step, standing)
        if failed_before or not self._is_async:
            self.wait()

    def wait(self) -> None:
        """Returns when nothing is being written; raises ForgeError, on every rank, when it could not be."""
        failure = self._failure()
        if failure is not None:
            self._saved = None
            raise ForgeError(failure)

    def close(self) -> None:
        """Ends its threads, once nothing is being written; what could not be is in the log."""
        self._thread.shutdown()
        self._manager.close()

    def _base(self, note: Path | None) -> int:
        self.folder.tidy()
        if note is None:
            return self._newest()
        if note.is_file():
            step = int(note.read_text())
            if step and (step not in self.folder.steps() or self.folder.damage(step)):
                raise ActorFailure(
                    f"the trainer can't be replaced: this run started from {self.folder.of(step)}, which is "
                    "gone or damaged, and has no snapshot yet. Start it anew, from the newest checkpoint; "
                    "leave the folder alone while it runs"
                )
            return step
        step = self._newest()
        new = note.with_name(f"{note.name}.new")
        new.write_text(str(step))
        os.replace(new, note)
        return step

    def _newest(self) -> int:
        self.folder.set_later_aside(self._options.load_step)
        damaged: dict[int, str] = {}
        for step in reversed(self.folder.steps()):
            damage = self.folder.damage(step)
            if damage is None:
                for bad in damaged:
                    self.folder.set_aside(bad)
                return step
            damaged[step] = damage
            logger.error("%s is damaged: %s. The one before it is tried", self.folder.of(step), damage)
        if damaged:
            listed = "; ".join(f"step-{step}: {damage}" for step, damage in damaged.items())
            raise ForgeError(
                f"every checkpoint in {self.folder.path} is damaged ({listed}): delete them to start from "
                "the model's own weights, or name another checkpoint.folder"
            )
        return 0

    def _begin(self, step: int) -> bool:
        if any(complete > step for complete in self.folder.steps()):
            return False
        self.folder.drop_partial()
        return True

    def _write(self, step: int) -> "Future[Any] | None":
        """Begins to write, or, unless async, writes."""
        mode = titan.AsyncMode.ASYNC if self._is_async else titan.AsyncMode.DISABLED
        _expect_one_process()
        try:
            writing = self._manager.dcp_save(self._states(), str(self.folder.partial(step)), mode)
        except CheckpointException as error:  # no Exception
            raise ForgeError(self._give_up(step, error)) from error
        return writing if isinstance(writing, Future) else None  # else what was written

    def _finish(self, step: int, writing: "Future[Any] | None", also_kept: Collection[int]) -> str | None:
        """Once it is written it takes its place; why not, if that fails."""
        try:
            if writing is not None:
                writing.result()
            if self._rank == 0:
                self.folder.finish(step)
        except (CheckpointException, OSError) as error:
            return self._give_up(step, error)
        if self._rank == 0:
            self.folder.purge(self._options.keep_latest_k, also_kept)
        return None

    def _failure(self) -> str | None:
        """Waits; why the last save failed; None when it did not, or this was asked before.

        Rank 0 answers for all: some things fail on it alone.
        """
        if self._saving is None:
            return None
        saving, self._saving = self._saving, None
        wait_for([saving])
        return from_rank_0(saving.result, self._rank)

    def _give_up(self, step: int, error: BaseException) -> str:
        """Says so in the log at once: nobody may ask for a long time."""
        told = (
            f"the checkpoint {self.folder.of(step)} could not be written: {_reason(error)}. Those before it "
            "are as they were: make room, or name another checkpoint.folder"
        )
        if self._rank == 0:
            logger.error(told)
            self.folder.drop_partial()  # makes room
        return told

    def _param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._learner.update.optimizers for group in optimizer.param_groups]

    def _own_facts(self) -> dict[str, Any]:
        adapters = {"lora": self._lora, "base": self._learner.model.base}
        return _by_name(self._learner.facts()) | _by_name(self._standing) | adapters

    def _states(self) -> dict[str, Any]:
        return {_FACTS: self._facts, **self._tensors()}

    def _tensors(self) -> dict[str, Any]:
        """What is trained, by name, and the state of optimizer and schedule."""
        states = {name: state for name, state in self._manager.states.items() if state is not None}
        del states[_FACTS]
        weights = states.pop(titan.MODEL).state_dict()
        if self._lora is not None:  # all else comes from the model's folder
            weights = {name: tensor for name, tensor in weights.items() if is_adapter(name)}
        return {**states, **weights}


def _expect_one_process() -> None:
    """Silences what torch says, in whatever thread, when it saves or loads without other processes."""
    if not dist.is_initialized():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """What the user decides of a parameter group."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _described(lora: LoRAOptions | None) -> dict[str, Any] | None:
    """The same for all ways to write down the same adapters."""
    return None if lora is None else {"rank": lora.rank, "alpha": lora.alpha, "layers": list(lora.layers)}


def _by_name(facts: Facts | Standing) -> dict[str, Any]:
    """As plain data: a checkpoint outlives the names of classes."""
    return {f.name: getattr(facts, f.name) for f in fields(facts)}


def _reason(error: BaseException) -> str:
    """In one line: the first rank's error of a CheckpointException."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {type(first).__name__}: {first}"
    return str(error)
