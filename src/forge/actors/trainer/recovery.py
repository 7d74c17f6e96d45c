"""Recovery: the trainer's work written down before it is done, so that after a kill it ends up the same.

This is the small thing for a process that dies within a run, on its host and under its own layout.
Checkpoints are the other: to keep, to move and to resume a run from.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from forge.actors.trainer.micro_batch import MicroBatch
from forge.actors.trainer.snapshot import Snapshots
from forge.actors.trainer.steps import Steps
from forge.actors.trainer.work import Answer, Failed, Method, Record, Standing, Unrecoverable, Work
from forge.controller.journal import Journal
from forge.data_models import ForwardBackwardResult, Progress
from forge.errors import ActorFailure, ForgeError

if TYPE_CHECKING:
    from forge.actors.trainer.checkpoint import Checkpoints
    from forge.actors.trainer.learner import Learner
    from forge.actors.trainer.pushes import Pushes

logger = logging.getLogger(__name__)

_KEPT_ANSWERS = 256
"""More calls than can be under way at once: of those that were answered nobody asks again."""


class Recovery:
    """Does the trainer's work, in order, on its compute thread; every rank must do the same.

    Rank 0 writes down each call before anything is touched, and every `snapshot_every` optimizer steps each
    rank writes its state to a file. A new process loads the newest snapshot that is whole and repeats what
    was written down since. The journal may hold more than is missing: numbers tell. A snapshot is written
    while the next batch is computed, as nothing but an optimizer step changes what it holds.

    As long as there is no snapshot, a new process starts from what the first one started from: a checkpoint,
    which is written down, or the model's own weights. That checkpoint is not deleted meanwhile.

    A version that is pushed and not stored yet can be pushed again only from work that is repeated. So each
    rank writes its part of a snapshot when its part of the version is stored: a snapshot that is whole comes
    after a version that is whole. Where it could not be stored, there are none until another one is.
    """

    def __init__(
        self,
        learner: "Learner",
        folder: Path | None,
        *,
        rank: int,
        world_size: int,
        snapshot_every: int,
        steps: Steps | None = None,
        checkpoints: "Checkpoints | None" = None,
        pushes: "Pushes | None" = None,
    ) -> None:
        self._learner, self._folder, self._rank = learner, folder, rank
        self._steps = steps or Steps(learner)
        self._checkpoints = checkpoints
        self._pushes = pushes
        self._state: dict[str, Any] = {}  # the caller's
        self._base = 0  # the checkpoint that this run started from
        self._snapshot_every = snapshot_every
        self._snapshots = Snapshots(folder, rank=rank, world_size=world_size) if folder is not None else None
        self._journal: Journal | None = None  # of rank 0, once restored
        self._number = 0  # of the last work
        self._first = 0  # the journal holds the work after this
        self._answers: dict[str, Answer | ForgeError | None] = {}  # by call
        self._failed: set[int] = set()
        self._push_mark = None if folder is None else folder / "pushed"
        self.restored = False
        self.others_pushed = False  # whether processes that are gone may have begun to push a version

    @property
    def pushed(self) -> bool:
        """Whether any process of this trainer, gone or not, has begun to push a version."""
        return self._push_mark is not None and self._push_mark.exists()

    def restore(self) -> list[Work]:
        """Loads the newest snapshot, else the checkpoint that the run started or is to start from; returns
        what was done after it, for `repeat`. To be called once.

        Raises ActorFailure when a disk without room kept work from being written down, or when that
        checkpoint is gone; ForgeError when all checkpoints are damaged.
        """
        self.restored = True
        if self._folder is None or self._snapshots is None:
            self._load_checkpoint(note=None)
            return []
        self.others_pushed = self.pushed
        journal = Journal(self._folder / "journal")
        for record in journal.records:
            if isinstance(record, Unrecoverable):
                raise ActorFailure(record.why)
        number = self._snapshots.newest()
        if number:
            self._learner.allocate()
            facts, standing, self._answers = self._snapshots.read(number, self._learner.tensors())
            self._learner.resume(facts)
            self._stand(standing)
            self._number = self._first = number
        else:
            self._load_checkpoint(note=self._folder / "checkpoint")
        since: list[Record] = [record for record in journal.records if record.number > number]
        self._failed = {record.number for record in since if isinstance(record, Failed)}
        self.meet()  # all have read before one of them writes
        if self._rank == 0:
            journal.records = []
            self._journal = journal
        else:
            journal.close()
        return [record for record in since if isinstance(record, Work)]

    def repeat(self, work: Work) -> None:
        """Does again what was done before the kill; if it failed then, it may fail now."""
        try:
            self._perform(work)
        except ForgeError:
            assert work.call is None or work.call in self._answers
        except Exception:  # raised again, unless it is what was written down
            if work.number not in self._failed:
                raise

    def do(
        self,
        call: str | None,
        method: Method,
        batches: Sequence[MicroBatch] = (),
        version: int | None = None,
        state: dict[str, Any] | None = None,
        wait: bool = True,
    ) -> Answer | None:
        """The answer to a call, which is that of the first time when the call is a repetition."""
        if call is not None and call in self._answers:
            answer = self._answers[call]
            if isinstance(answer, ForgeError):
                raise answer
            return answer
        if method == "push_weights" and self._push_mark is not None:
            self._push_mark.touch()
        work = Work(self._number + 1, call, method, batches, version, state, wait)
        self._write_down(work)
        try:
            return self._perform(work)
        except ForgeError:
            raise
        except Exception:  # written down, and raised again
            self._write_down(Failed(work.number))
            raise

    def close(self) -> None:
        """Returns when no file is being written any more."""
        if self._snapshots is not None:
            self._snapshots.wait()
        if self._journal is not None:
            self._journal.close()
        if self._checkpoints is not None:
            self._checkpoints.close()

    def progress(self) -> Progress:
        """How far the trainer has come."""
        return Progress(self._learner.num_steps, self._state)

    def _perform(self, work: Work) -> Answer | None:
        self._number = work.number
        num_steps = self._learner.num_steps
        try:
            answer = self._compute(work)
        except Exception as error:  # gathered gradients go with it; raised again
            self._steps.forget()
            if isinstance(error, ForgeError):
                self._finish(work, error, has_stepped=self._learner.num_steps > num_steps)
            raise
        self._finish(work, answer, has_stepped=self._learner.num_steps > num_steps)
        return answer

    def _finish(self, work: Work, answer: Answer | ForgeError | None, *, has_stepped: bool) -> None:
        """Keeps what came of it. A step that was done counts, though the loss failed at being told of it."""
        if work.state is not None and (has_stepped or not isinstance(answer, ForgeError)):
            self._state = work.state
        if work.method != "push_weights":  # whether that was done is known by what is pushed
            self._keep(work.call, answer)
        if has_stepped:
            self._save_if_due()

    def _compute(self, work: Work) -> Answer | None:
        answer = None
        match work.method:
            case "train_step":
                result = self._steps.forward_backward(work.batches)
                answer = ForwardBackwardResult(result.loss, {**result.metrics, **self._update()})
            case "forward_backward":
                answer = self._steps.forward_backward(work.batches)
            case "optim_step":
                answer = self._update()
            case "save_checkpoint":
                self._save_checkpoint(work.state, wait=work.wait)
            case "push_weights":
                pass
        return answer

    def _update(self) -> dict[str, float]:
        if self._snapshots is not None:
            self._snapshots.wait()  # it reads the weights
        return self._steps.optim_step()

    def _keep(self, call: str | None, answer: Answer | ForgeError | None) -> None:
        if call is not None:
            self._answers[call] = answer
            while len(self._answers) > _KEPT_ANSWERS:
                del self._answers[next(iter(self._answers))]

    def _save_if_due(self) -> None:
        """After an update."""
        every, step = self._snapshot_every, self._learner.num_steps
        if self._snapshots is not None and every and step % every == 0 and self._pushes_are_stored():
            facts = (self._learner.facts(), self._standing(), self._answers)
            self._snapshots.begin(self._number, facts, self._learner.tensors())
        if self._checkpoints is not None and self._checkpoints.is_due(step):
            self._checkpoints.save(self._standing(), self._needed)

    def _pushes_are_stored(self) -> bool:
        """Who starts from a snapshot can't push versions that were pushed before it."""
        return self._pushes is None or self._pushes.wait_stored()

    def _save_checkpoint(self, state: dict[str, Any] | None, *, wait: bool) -> None:
        if self._checkpoints is None:
            raise ForgeError("save_checkpoint needs checkpoint.folder: give the trainer one")
        if self._steps.under_way:
            raise ForgeError(
                "save_checkpoint came between forward_backward and optim_step, and gathered gradients are in "
                "no checkpoint: call it after optim_step"
            )
        if state is not None:
            self._state = state
        self._checkpoints.save(self._standing(), self._needed)
        if wait:
            self._checkpoints.wait()

    def _load_checkpoint(self, note: Path | None) -> None:
        """note: the file that says which one the run started from; None: there can't be one."""
        if self._checkpoints is not None:
            self._base = self._checkpoints.base(note)
            if self._base:
                self._stand(self._checkpoints.load(self._base))

    @property
    def _needed(self) -> list[int]:
        """The checkpoints that a process may have to start from that takes this one's place."""
        has_snapshot = self._snapshots is None or self._snapshots.newest() > 0
        return [] if has_snapshot else [self._base]

    def _standing(self) -> Standing:
        return Standing(self._steps.num_skipped, self._state)

    def _stand(self, standing: Standing) -> None:
        self._steps.num_skipped, self._state = standing.num_skipped, standing.state

    def _write_down(self, record: Record) -> None:
        if self._journal is None or self._snapshots is None:
            return
        try:
            self._cut()
            self._journal.append(record)
        except OSError as error:
            self._give_up(error)

    def _cut(self) -> None:
        """Drops from the journal what the newest snapshot holds, and the snapshots before it."""
        assert self._folder is not None and self._journal is not None and self._snapshots is not None
        newest = self._snapshots.newest()
        if newest > self._first:
            self._snapshots.drop_older(newest)
            old = Journal(self._folder / "journal")
            self._journal.rewrite(record for record in old.records if record.number > newest)
            old.close()
            self._first = newest

    def _give_up(self, error: OSError) -> None:
        """Leaves word to whoever takes this process's place that it can't, and goes on without it."""
        assert self._folder is not None and self._journal is not None and self._snapshots is not None
        why = (
            f"the trainer's work could not be written down in {self._folder} ({error.strerror}), so that it "
            "can't be replaced when its process is killed: set TMPDIR to a folder with more room"
        )
        logger.warning("%s. Training goes on", why)
        self._snapshots.drop_older(self._number + 1)  # makes room
        self._journal.rewrite([Unrecoverable(self._number + 1, why)])
        self._journal.close()
        self._journal = None

    @staticmethod
    def meet() -> None:
        """Waits for the other ranks."""
        if dist.is_initialized():
            dist.barrier()
