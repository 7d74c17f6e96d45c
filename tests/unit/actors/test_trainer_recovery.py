"""What a trainer keeps for the process that takes its place: snapshots, the journal, answers."""

import logging
import math
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.actors.trainer.bad_batches import load_bad_batch
from forge.actors.trainer.learner import Facts
from forge.actors.trainer.recovery import Recovery
from forge.actors.trainer.snapshot import Snapshots
from forge.actors.trainer.steps import Steps
from forge.actors.trainer.work import Answer, Standing
from forge.data_models import ForwardBackwardResult, Progress
from forge.errors import ActorFailure, ForgeError, NotFinite

STEEP = 1e6  # a gradient that is not finite


class Counter:
    """A learner whose weight is the sum of all batches, which are plain numbers here."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1000)
        self.gradient = 0.0
        self.num_steps = 0
        self.error: Exception | None = None
        self.refuses = False  # the loss, to be told of a step

    def forward_backward(self, batches: Sequence[float]) -> ForwardBackwardResult:
        if self.error is not None:
            raise self.error
        if not batches:
            raise ForgeError("an empty batch")
        if math.inf in batches:
            raise NotFinite("the loss of episode 7 is not finite", ["7"])
        self.gradient += sum(batches)
        return ForwardBackwardResult(self.gradient)

    def optim_step(self) -> dict[str, float]:
        if self.gradient >= STEEP:
            raise NotFinite("the gradient is not finite")
        self.weight += self.gradient
        self.num_steps += 1
        self.forget()
        if self.refuses:
            raise ForgeError("after_step failed")
        return {"lr": 0.5 * self.num_steps}

    def forget(self) -> None:
        self.gradient = 0.0

    def allocate(self) -> None:
        pass

    def tensors(self) -> list[Tensor]:
        return [self.weight]

    def facts(self) -> Facts:
        return Facts(self.num_steps, (torch.get_rng_state(), None), None)

    def resume(self, facts: Facts) -> None:
        self.num_steps = facts.num_steps


class Saves:
    """Checkpoints of which only the number of steps and the caller's state are kept."""

    def __init__(self, saved: list[tuple[int, dict[str, Any]]], learner: Counter) -> None:
        self._saved, self._learner = saved, learner

    def base(self, note: Path | None) -> int:
        return 0

    def is_due(self, step: int) -> bool:
        return False

    def save(self, standing: Standing, also_kept: Sequence[int]) -> None:
        self._saved.append((self._learner.num_steps, standing.state))

    def wait(self) -> None:
        self._saved.append((self._learner.num_steps, {"waited": True}))

    def close(self) -> None:
        pass


def started(
    folder: Path,
    every: int = 2,
    error: Exception | None = None,
    saved: list[tuple[int, dict[str, Any]]] | None = None,
) -> tuple[Counter, Recovery]:
    """A process that has caught up; one that was there before is taken to be dead."""
    learner = Counter()
    steps = Steps(learner, max_skipped=2, folder=folder / "bad")  # type: ignore[arg-type]
    recovery = Recovery(
        learner,  # type: ignore[arg-type]
        folder,
        rank=0,
        world_size=1,
        snapshot_every=every,
        steps=steps,
        checkpoints=None if saved is None else Saves(saved, learner),  # type: ignore[arg-type]
    )
    learner.error = error
    for work in recovery.restore():
        recovery.repeat(work)
    return learner, recovery


def train(recovery: Recovery, *batches: float, call: str | None = None) -> Answer | None:
    return recovery.do(call or f"of {batches}", "train_step", batches)  # type: ignore[arg-type]


@contextmanager
def files_up_to(nbytes: int) -> Iterator[None]:
    """As if the disk had no more room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("every", [0, 1, 2, 100])
def test_one_that_takes_over_at_any_point_has_trained_each_batch_once(tmp_path: Path, every: int) -> None:
    for batch in range(1, 8):
        learner, recovery = started(tmp_path, every)
        answer = train(recovery, batch)
        assert train(recovery, batch) == answer  # the caller, who did not get it, asks again
        recovery.close()
        learner, recovery = started(tmp_path, every)
        assert train(recovery, batch) == answer
        assert (learner.weight[0], learner.num_steps) == (sum(range(batch + 1)), batch)


def test_gathered_gradients_are_gathered_again(tmp_path: Path) -> None:
    _, recovery = started(tmp_path)
    train(recovery, 1.0)
    train(recovery, 2.0)
    recovery.do("a", "forward_backward", [3.0])  # type: ignore[list-item]
    recovery.close()
    learner, recovery = started(tmp_path)
    assert recovery.do("b", "optim_step") == {"lr": 1.5}
    assert learner.weight[0] == 6


def test_an_error_is_raised_again_to_the_caller_it_belongs_to(tmp_path: Path) -> None:
    _, recovery = started(tmp_path)
    train(recovery, 1.0)
    with pytest.raises(ForgeError, match="an empty batch"):
        train(recovery, call="empty")
    for _ in range(2):  # from the journal, then from the snapshot
        recovery.close()
        learner, recovery = started(tmp_path)
        with pytest.raises(ForgeError, match="an empty batch"):
            train(recovery, call="empty")
        train(recovery, 2.0)
    assert learner.weight[0] == 3


@pytest.mark.parametrize("every", [0, 1])
def test_steps_that_are_not_finite_are_skipped_until_there_are_too_many_in_a_row(
    tmp_path: Path, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    skipped = repr(ForwardBackwardResult(math.nan, {"skipped": 1.0}))
    _, recovery = started(tmp_path, every)
    train(recovery, 1.0)
    for call, batch in enumerate([math.inf, 2.0, math.inf]):
        assert (repr(train(recovery, batch, call=str(call))) == skipped) == (batch == math.inf)
    assert train(recovery, STEEP) == ForwardBackwardResult(STEEP, {"skipped": 1.0})
    recovery.close()
    learner, recovery = started(tmp_path, every)  # repeats them: two in a row
    assert repr(train(recovery, math.inf, call="2")) == skipped  # asked again
    for _ in range(2):
        with pytest.raises(NotFinite, match="episode 7 .* 3 steps in a row; training.max_skipped_steps is 2"):
            train(recovery, math.inf, call="third")
    assert (learner.weight[0], learner.num_steps) == (3, 2)
    assert "step 2 is skipped: the loss of episode 7 is not finite (the batch: " in caplog.text
    bad = load_bad_batch(tmp_path / "bad/step-3.attempt-2.pt")
    assert (bad.step, bad.batches, bad.episode_ids) == (3, [STEEP], [])
    assert bad.reason == "the gradient is not finite"
    assert load_bad_batch(tmp_path / "bad/step-2.attempt-1.pt").episode_ids == ["7"]


def test_one_pass_that_is_not_finite_spoils_the_step_and_no_other(tmp_path: Path) -> None:
    learner, recovery = started(tmp_path)
    for batch in (1.0, math.inf, 2.0):
        recovery.do(f"pass {batch}", "forward_backward", [batch])  # type: ignore[list-item]
    assert recovery.do("first", "optim_step") == {"skipped": 1.0}
    assert load_bad_batch(tmp_path / "bad/step-1.attempt-1.pt").batches == [1.0, math.inf]
    recovery.close()
    learner, recovery = started(tmp_path)
    train(recovery, 4.0)
    assert (learner.weight[0], learner.num_steps) == (4, 1)


@pytest.mark.parametrize(("every", "wait"), [(0, True), (1, True), (0, False)])
def test_a_checkpoint_is_saved_once_for_its_caller_and_of_the_state_it_was_asked_for(
    tmp_path: Path, every: int, wait: bool
) -> None:
    saved: list[tuple[int, dict[str, Any]]] = []
    _, recovery = started(tmp_path, every, saved=saved)
    train(recovery, 1.0)
    recovery.do("save", "save_checkpoint", state={"position": 1}, wait=wait)
    recovery.do("step", "train_step", [2.0], state={"position": 2})  # type: ignore[list-item]
    recovery.close()
    _, recovery = started(tmp_path, every, saved=saved)
    once = [(1, {"position": 1}), *([(1, {"waited": True})] if wait else [])]
    again = [] if every else once  # no snapshot: its checkpoint may have been under way
    assert saved == [*once, *again]
    recovery.do("save", "save_checkpoint", state={"position": 1}, wait=wait)  # asked again: it got no answer
    assert saved == [*once, *again]
    assert recovery.progress() == Progress(2, {"position": 2})


def test_a_step_counts_that_was_done_though_the_loss_failed_at_being_told_of_it(tmp_path: Path) -> None:
    learner, recovery = started(tmp_path, every=1)
    train(recovery, math.inf, call="skipped")
    learner.refuses = True

    def step() -> None:
        with pytest.raises(ForgeError, match="after_step failed"):
            recovery.do("refused", "train_step", [3.0], state={"position": 2})  # type: ignore[list-item]

    step()
    recovery.close()
    assert [path.name for path in tmp_path.glob("snapshot-*")] == ["snapshot-2.rank0of1"]
    learner, recovery = started(tmp_path, every=1)
    step()  # asked again
    assert recovery.progress() == Progress(1, {"position": 2})
    assert learner.weight[0] == 3
    for call in range(2):  # not the second and third in a row
        train(recovery, math.inf, call=str(call))


def test_work_that_failed_unforeseen_may_fail_again_or_be_done(tmp_path: Path) -> None:
    _, recovery = started(tmp_path, error=RuntimeError("connection closed by peer"))
    with pytest.raises(RuntimeError):
        train(recovery, 1.0)
    recovery.close()
    learner, recovery = started(tmp_path, error=RuntimeError("still"))
    assert learner.num_steps == 0
    recovery.close()
    learner, _ = started(tmp_path)
    assert learner.weight[0] == 1


def test_work_that_succeeded_must_not_fail_when_it_is_repeated(tmp_path: Path) -> None:
    _, recovery = started(tmp_path)
    train(recovery, 1.0)
    recovery.close()
    with pytest.raises(RuntimeError, match="out of memory"):
        started(tmp_path, error=RuntimeError("out of memory"))


def test_the_folder_holds_one_snapshot_and_the_work_since(tmp_path: Path) -> None:
    _, recovery = started(tmp_path)
    for batch in range(20):
        train(recovery, batch)
    recovery.close()
    assert len(list(tmp_path.glob("snapshot-*"))) <= 2
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 40_000
    assert (tmp_path / "journal").stat().st_size < 2_000


def test_a_snapshot_counts_when_all_ranks_have_written_their_part(tmp_path: Path) -> None:
    ranks = [Snapshots(tmp_path, rank=rank, world_size=2) for rank in (0, 1)]
    weights = [torch.full((3,), 1.0), torch.tensor(2.0), torch.empty(0)]

    def write(rank: int, number: int) -> None:
        ranks[rank].begin(number, f"step {number}", weights)
        ranks[rank].wait()

    write(0, 5)
    assert ranks[0].newest() == 0
    write(1, 5)
    write(1, 7)
    (tmp_path / "snapshot-7.rank0of2.partial").touch()  # killed here
    assert ranks[0].newest() == 5
    found = [torch.zeros_like(tensor) for tensor in weights]
    assert Snapshots(tmp_path, rank=1, world_size=2).read(5, found) == "step 5"
    assert all(map(torch.equal, found, weights))
    for rank in (0, 1):
        write(rank, 9)
    ranks[0].drop_older(ranks[0].newest())
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"snapshot-9.rank{r}of2" for r in (0, 1)]


def test_without_room_for_a_snapshot_training_goes_on_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with files_up_to(3_000), caplog.at_level(logging.WARNING):
        _, recovery = started(tmp_path, every=1)
        for batch in (1.0, 2.0, 3.0):
            train(recovery, batch)
        recovery.close()
    [message] = caplog.messages
    assert f"no snapshot of the trainer's state could be written to {tmp_path}" in message
    assert "TMPDIR" in message and "training.snapshot_every" in message
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
    learner, _ = started(tmp_path)
    assert learner.weight[0] == 6


def test_without_room_for_the_journal_a_kill_ends_the_run_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner, recovery = started(tmp_path, every=0)
    with files_up_to(1_000), caplog.at_level(logging.WARNING):
        for batch in range(100):
            train(recovery, batch)
    assert len(caplog.messages) == 1
    assert learner.num_steps == 100
    with pytest.raises(ActorFailure, match=f"could not be written down in {tmp_path}.*set TMPDIR"):
        started(tmp_path)
