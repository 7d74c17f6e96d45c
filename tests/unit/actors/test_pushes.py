"""Pushes of the trainer: what goes on beside its next step, and what a kill meanwhile leaves to do."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forge.weights
from forge.actors.trainer.pushes import Pushes, to_push_again
from forge.actors.trainer.recovery import Recovery
from forge.errors import WeightsMissing
from tests.unit.actors.test_trainer_recovery import Counter


class Store:
    """As much of forge.weights as a trainer sees: a version is there once a slow `publish` may end."""

    def __init__(self) -> None:
        self.whole: list[int] = []
        self.may_end = asyncio.Event()
        self.may_retire = asyncio.Event()
        self.may_retire.set()
        self.error: Exception | None = None  # of `publish`
        self.failed: dict[int, str] = {}

    async def begin_push(self, version: int, *, rank: int, world_size: int) -> "SlowPush":
        return SlowPush(self, version)

    async def versions(self) -> list[int]:
        return list(self.whole)

    async def retire(self, version: int) -> None:
        await self.may_retire.wait()
        self.whole.remove(version)


class SlowPush:
    def __init__(self, store: Store, version: int) -> None:
        self._store, self._version = store, version
        self.is_packed = False

    async def fail(self, error: BaseException) -> None:
        self._store.failed[self._version] = str(error)

    async def publish(self) -> None:
        assert self.is_packed
        await self._store.may_end.wait()
        if self._store.error is not None:
            raise self._store.error
        self._store.whole.append(self._version)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = Store()
    for name in ("begin_push", "versions", "retire"):
        monkeypatch.setattr(forge.weights, name, getattr(store, name))
    yield store


async def begin(pushes: Pushes, version: int) -> None:
    async def pack(push: Any) -> None:
        push.is_packed = True

    await pushes.begin(version, pack)


def test_a_push_goes_on_by_itself_one_at_a_time_and_the_newest_two_are_kept(store: Store) -> None:
    async def main() -> None:
        pushes = Pushes(rank=0, world_size=1)
        await begin(pushes, 1)
        second = asyncio.ensure_future(begin(pushes, 2))
        await asyncio.sleep(0.01)
        assert not second.done() and store.whole == []
        store.may_end.set()
        await second
        for version in (3, 4):
            await begin(pushes, version)
        await pushes.finish()

    asyncio.run(main())
    assert store.whole == [3, 4]


def test_slow_readers_of_old_versions_hold_up_no_push_but_only_the_next_retiring(store: Store) -> None:
    async def main() -> None:
        pushes = Pushes(rank=0, world_size=1)
        store.may_end.set()
        store.may_retire.clear()
        for version in (1, 2, 3, 4):
            await begin(pushes, version)
        await pushes.stored()
        assert store.whole == [1, 2, 3, 4]
        store.may_retire.set()
        await pushes.finish()
        assert store.whole == [3, 4]
        store.may_retire.clear()
        await begin(pushes, 5)
        await asyncio.wait_for(pushes.close(), 1)
        assert store.whole == [3, 4, 5] and len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_an_error_is_logged_at_once_and_raised_once_to_who_asks_next(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        pushes = Pushes(rank=1, world_size=2)
        store.error = WeightsMissing("the volume is gone")
        store.may_end.set()
        await begin(pushes, 1)
        await asyncio.to_thread(pushes.wait_stored)
        assert "version 1 of the weights could not be stored: the volume is gone" in caplog.text
        with pytest.raises(WeightsMissing, match="the volume is gone"):
            await pushes.finish()
        store.error = None
        assert not pushes.wait_stored()
        await begin(pushes, 1)
        await pushes.finish()
        assert pushes.wait_stored()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert store.whole == [1]


def test_readers_hear_of_weights_that_could_not_be_copied(store: Store) -> None:
    async def pack(push: Any) -> None:
        raise MemoryError("no room for 3 GB")

    with pytest.raises(MemoryError):
        asyncio.run(Pushes(rank=0, world_size=1).begin(5, pack))
    assert store.failed == {5: "no room for 3 GB"}


def test_a_version_that_is_not_stored_is_still_to_be_pushed_by_who_comes_after_a_kill(
    store: Store, tmp_path: Path
) -> None:
    """A snapshot of a later step would forget it: its weights are gone then."""

    async def main() -> None:
        pushes = Pushes(rank=0, world_size=1)
        recovery = trainer(tmp_path, pushes)
        await step(recovery, 1.0)
        recovery.do("push", "push_weights", version=1)
        await begin(pushes, 1)
        following = asyncio.ensure_future(step(recovery, 2.0))
        await asyncio.sleep(0.05)
        assert restored(tmp_path) == ([1], 1) and recovery.others_pushed is False
        store.may_end.set()
        await following
        await step(recovery, 3.0)  # when the snapshot of the one before is written
        assert restored(tmp_path)[0] == []

    asyncio.run(main())


def test_a_version_that_could_not_be_stored_is_to_be_pushed_again_after_a_kill(
    store: Store, tmp_path: Path
) -> None:
    async def main() -> None:
        pushes = Pushes(rank=0, world_size=1)
        recovery = trainer(tmp_path, pushes)
        await step(recovery, 1.0)
        recovery.do("push", "push_weights", version=1)
        store.error = WeightsMissing("the volume is gone")
        store.may_end.set()
        await begin(pushes, 1)
        for batch in (2.0, 3.0, 4.0):
            await step(recovery, batch)
        assert restored(tmp_path) == ([1], 1)
        with pytest.raises(WeightsMissing):
            await pushes.stored()
        assert restored(tmp_path) == ([1], 1), "also when its caller knows"
        store.error = None
        await begin(pushes, 4)
        for batch in (5.0, 6.0):
            await step(recovery, batch)
        assert restored(tmp_path)[0] == []

    asyncio.run(main())


def restored(folder: Path) -> tuple[list[int | None], int]:
    """Versions that a new process would push again, and the steps that it starts from."""
    learner = Counter()
    work = Recovery(learner, folder, rank=0, world_size=1, snapshot_every=1).restore()  # type: ignore[arg-type]
    return [each.version for each in work if each.method == "push_weights"], learner.num_steps


def trainer(folder: Path, pushes: Pushes) -> Recovery:
    learner: Any = Counter()
    recovery = Recovery(learner, folder, rank=0, world_size=1, snapshot_every=1, pushes=pushes)
    recovery.restore()
    return recovery


def step(recovery: Recovery, batch: float) -> Any:
    return asyncio.to_thread(recovery.do, f"step {batch}", "train_step", [batch])  # type: ignore[list-item]


def test_versions_that_the_store_should_hold_are_pushed_again() -> None:
    assert to_push_again([], whole=[3, 4]) == []
    assert to_push_again([4], whole=[3, 4]) == []
    assert to_push_again([3, 4], whole=[3]) == [4]
    assert to_push_again([2, 3, 4], whole=[]) == [3, 4]  # a later push would have retired 2
    assert to_push_again([1, 2, 3, 4, 5], whole=[4]) == [5]
