"""ReplayBuffer: any sequence of calls and kills, against a model that knows nothing of journals."""

import asyncio
import copy
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from forge.actors import episode_queue
from forge.controller import journal
from tests.unit.actors.test_replay_buffer_kill import call, episode, ids, started


@dataclass
class Model:
    """What a buffer that never dies would do."""

    per_step: int
    max_age: int
    sync: int
    version: int = 0
    admitted: int = 0
    waiting: list[tuple[str, int]] = field(default_factory=list)  # id, policy version
    ever: set[str] = field(default_factory=set)
    sampled: dict[str, list[str]] = field(default_factory=dict)  # call -> ids
    dropped: list[str] = field(default_factory=list)

    def room(self) -> bool:
        generating = self.version // self.sync * self.sync
        return self.admitted < (generating + self.max_age + 1) * self.per_step

    def advance(self, version: int) -> None:
        self.version = max(self.version, version)
        self.drop_old()

    def drop_old(self) -> None:
        old = [name for name, version in self.waiting if version + self.max_age < self.version]
        self.waiting = [(n, v) for n, v in self.waiting if n not in old]
        self.dropped += old
        self.admitted -= len(old)

    def add(self, episodes: list[tuple[str, int]]) -> None:
        for name, version in episodes:
            if name not in self.ever:
                self.ever.add(name)
                self.waiting.append((name, version))
        self.drop_old()

    def sample(self, call: str, count: int) -> list[str]:
        self.sampled[call] = [name for name, _ in self.waiting[:count]]
        self.waiting = self.waiting[count:]
        return self.sampled[call]


@dataclass
class Op:
    call: str
    kind: str  # "admit", "add" or "sample"
    amount: int = 0  # episodes to admit; batch size to sample
    episodes: list[tuple[str, int]] = field(default_factory=list)
    version: int = 0
    wait: bool = False
    is_done: bool = False  # has had its effect


class Life:
    """One buffer over many processes, with the model beside it."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        r = self.random
        dp, sync = r.choice([1, 2]), r.choice([1, 1, 2])
        self.settings = {
            "batch_size": r.randint(1, 3),
            "max_policy_age": r.randint(sync - 1, 3),
            "dp_size": dp,
            "sync_interval": sync,
        }
        self.dp = dp
        self.folder = folder
        self.file = folder / "replay_buffer.journal"
        self.model = Model(self.settings["batch_size"] * dp, self.settings["max_policy_age"], sync)
        self.ops: list[Op] = []
        self.pending: list[tuple[Op, asyncio.Task[Any]]] = []
        self.num_ids = 0
        # where a kill in the middle of the last operation may leave things: size range of the file, model
        self.cuts: list[tuple[range, Model, Op]] = []

    async def run(self, num_ops: int) -> None:
        self.buffer = await started(self.folder, **self.settings)
        for _ in range(num_ops):
            kind = self.random.choices(
                ["admit", "add", "sample", "repeat", "kill"], weights=[3, 4, 4, 2, 1.5]
            )[0]
            if kind == "kill":
                await self.kill()
            elif kind == "repeat":
                await self.repeat(self.random.choice(self.ops[-12:])) if self.ops else None
            elif not any(op.kind == kind for op, _ in self.pending):
                await self.do(self.new_op(kind))
            await self.compare()
        await self.kill()
        await self.compare()
        for task in [task for _, task in self.pending]:
            task.cancel()

    def new_op(self, kind: str) -> Op:
        r, model = self.random, self.model
        op = Op(f"call {len(self.ops)}", kind)
        if kind == "admit":
            op.amount = r.randint(1, 4)
        elif kind == "add":
            for _ in range(r.randint(1, 5)):
                is_old = model.ever and r.random() < 0.1
                name = r.choice(sorted(model.ever)) if is_old else f"e{self.num_ids}"
                self.num_ids += 1
                op.episodes.append((name, max(0, model.version - r.randint(0, model.max_age + 1))))
        else:
            op.amount = r.choice([self.settings["batch_size"], r.randint(1, 4)])
            op.version = max(0, model.version + r.choice([-1, 0, 0, 1, 1, 2]))
            op.wait = r.random() < 0.5
        self.ops.append(op)
        return op

    def start(self, op: Op) -> asyncio.Task[Any]:
        b = self.buffer
        work = {
            "admit": lambda: b.admit(op.amount),
            "add": lambda: b.add(*(episode(name, version) for name, version in op.episodes)),
            "sample": lambda: b.sample(op.version, batch_size=op.amount, wait=op.wait),
        }[op.kind]()
        return asyncio.ensure_future(call(op.call, work))

    async def do(self, op: Op) -> None:
        """Runs an operation for the first time, or again after it was lost without an effect."""
        before, num_pending = copy.deepcopy(self.model), len(self.pending)
        size, inode = self.file.stat().st_size, self.file.stat().st_ino
        task = self.start(op)
        await settle()
        if op.kind == "sample":
            self.model.advance(op.version)
        advanced = copy.deepcopy(self.model)
        if self.would_wait(op):
            self.cuts = []
            if op.kind == "sample" and not op.wait:
                assert task.done() and task.result() is None
            elif self.random.random() < 0.5:
                assert not task.done()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                self.pending.append((op, task))
        else:
            self.check_answer(op, task)
            end = self.file.stat().st_size
            self.cuts = [(range(size, end), before, op), (range(end - 1, end), advanced, op)]
            if op.kind == "sample":
                self.cuts[0] = (range(size, size + 1), before, op)
        await self.check_pending()
        if num_pending > len(self.pending) or self.file.stat().st_ino != inode:
            self.cuts = []  # other calls were done, too, or the journal was rewritten, which is atomic

    def would_wait(self, op: Op) -> bool:
        if op.kind == "admit":
            return not self.model.room()
        return op.kind == "sample" and len(self.model.waiting) < op.amount * self.dp

    def check_answer(self, op: Op, task: asyncio.Task[Any]) -> None:
        """It must be done, with the effect that the model says."""
        assert task.done(), op
        op.is_done = True
        if op.kind == "admit":
            self.model.admitted += op.amount
        elif op.kind == "add":
            self.model.add(op.episodes)
        else:
            assert ids(task.result()) == self.model.sample(op.call, op.amount * self.dp)

    async def check_pending(self) -> None:
        """What waits ends as soon as it can, and no sooner."""
        await settle()
        for op, task in list(self.pending):
            if self.would_wait(op):
                assert not task.done(), op
            else:
                self.pending.remove((op, task))
                self.check_answer(op, task)

    async def repeat(self, op: Op) -> None:
        """The answer of an operation was lost: it is made again, under its old id."""
        if not op.is_done:
            if not self.pending:
                await self.do(op)
            return
        if (
            op.kind == "sample"
            and op.call not in list(self.model.sampled)[-episode_queue.REMEMBERED_BATCHES :]
        ):
            return
        task = self.start(op)
        await settle()
        assert task.done(), op
        if op.kind == "sample":
            assert ids(task.result()) == self.model.sampled[op.call]
            self.model.advance(op.version)
            await self.check_pending()
        self.cuts = []

    async def kill(self) -> None:
        lost = [op for op, _ in self.pending]
        for _, task in self.pending:
            task.cancel()
        await asyncio.gather(*(task for _, task in self.pending), return_exceptions=True)
        self.pending = []
        if self.cuts and self.random.random() < 0.6:  # in the middle of the last operation's write
            sizes, self.model, op = self.random.choice(self.cuts)
            with open(self.file, "ab") as file:
                file.truncate(self.random.choice(sizes))
            op.is_done = False
            lost.append(op)
        self.cuts = []
        self.buffer = await started(self.folder, **self.settings)
        await self.compare()
        for op in lost:  # the controller repeats what was not answered
            if not any(other.kind == op.kind for other, _ in self.pending):
                await self.do(op)

    async def compare(self) -> None:
        info, model = await self.buffer.info(), self.model
        taken = [name for names in model.sampled.values() for name in names]
        assert (info.version, info.num_admitted) == (model.version, model.admitted)
        assert [e.episode_id for e in self.buffer._queue] == [name for name, _ in model.waiting]
        assert (info.num_added, info.num_sampled, info.num_dropped) == (
            len(model.ever),
            len(taken),
            len(model.dropped),
        )
        assert info.num_added == info.num_waiting + info.num_sampled + info.num_dropped
        everywhere = taken + model.dropped + [name for name, _ in model.waiting]
        assert sorted(everywhere) == sorted(model.ever)


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


@pytest.mark.parametrize("small_bytes", [4 * 2**20, 3000, 0])  # rewrites: never, at times, most of the time
def test_any_sequence_of_calls_and_kills_loses_nothing_and_counts_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    monkeypatch.setattr(journal, "SMALL_BYTES", small_bytes)
    for seed in range(80):
        try:
            asyncio.run(Life(seed, tmp_path / str(seed)).run(num_ops=50))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
