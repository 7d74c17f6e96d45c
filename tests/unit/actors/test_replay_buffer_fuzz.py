"""ReplayBuffer: any sequence of calls and kills, against a model that knows nothing of journals."""

import asyncio
import copy
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from forge.actors.buffer import history
from forge.controller import journal
from tests.unit.actors.test_replay_buffer_kill import call, episode, ids, started


@dataclass
class Waiting:
    """An episode that waits."""

    version: int
    unit: str  # what it came with
    is_promised: bool
    uses: int = 0
    used_at: int = -1  # the trainer's version


@dataclass
class Model:
    """What a buffer that never dies would do; which episodes it prefers is its own affair."""

    per_step: int
    max_age: int
    sync: int
    reuse: int
    bound: int
    version: int = 0
    told: int | None = None  # which version generates
    sampled_at: int = -1
    next_number: int = 0
    running: dict[int, tuple[int, int]] = field(default_factory=dict)  # number -> episodes, version
    to_redo: list[int] = field(default_factory=list)
    waiting: dict[str, Waiting] = field(default_factory=dict)
    ever: set[str] = field(default_factory=set)
    uses: Counter[str] = field(default_factory=Counter)
    sampled: dict[str, list[str]] = field(default_factory=dict)  # call -> ids
    dropped: list[str] = field(default_factory=list)

    def generates(self) -> int:
        return self.version // self.sync * self.sync if self.told is None else self.told

    def room(self, num: int) -> bool:
        following = max(self.version, self.told or 0, self.sampled_at + 1)
        slots = (self.generates() + self.bound + 1 - following) * self.per_step
        running = sum(size for size, _ in self.running.values())
        promised = running + sum(w.is_promised and not w.uses for w in self.waiting.values())
        uses = running * self.reuse + sum(self.reuse - w.uses for w in self.waiting.values() if w.is_promised)
        is_newest = self.generates() >= following // self.sync * self.sync
        if promised + num > slots:
            return promised < min(slots, self.per_step) and is_newest
        lacks = running + len(self.waiting) < self.per_step
        return uses + num * self.reuse <= slots or (lacks and is_newest)

    def ready(self, wanted: int) -> bool:
        """Whether with the most urgent taken, what is left and under way can still be taken in time."""
        if sum(w.used_at < self.version for w in self.waiting.values()) < wanted:
            return False
        due = sorted(self.due(w.unit) for w in self.waiting.values() if w.is_promised and not w.uses)
        left = due[wanted:]
        running = [version + self.max_age for size, version in self.running.values() for _ in range(size)]
        running = [d for d in running if d >= self.version]
        return all(
            sum(d <= last for d in left + running) <= (last - self.version) * self.per_step
            for last in range(self.version, max(left + running, default=0) + 1)
            if any(d <= last for d in running)
        )

    def due(self, unit: str) -> int:
        return min(w.version for w in self.waiting.values() if w.unit == unit and not w.uses) + self.max_age

    def admit(self, num: int) -> int:
        if self.to_redo:
            number = self.to_redo.pop(0)
        else:
            number, self.next_number = self.next_number, self.next_number + 1
        self.running[number] = num, self.generates()
        return number

    def restart(self, number: int) -> int:
        size, _ = self.end(number)
        given, self.next_number = self.next_number, self.next_number + 1
        self.running[given] = size, self.generates()
        return given

    def end(self, number: int) -> tuple[int, int]:
        self.to_redo = [n for n in self.to_redo if n != number]
        return self.running.pop(number)

    def advance(self, version: int) -> None:
        self.version = max(self.version, version)
        self.drop_old()

    def drop_old(self) -> None:
        for name, w in list(self.waiting.items()):
            if w.version + self.max_age < self.version:
                del self.waiting[name]
                if not w.uses:
                    self.dropped.append(name)

    def add(self, unit: str, number: int | None, episodes: list[tuple[str, int]]) -> None:
        is_promised = number in self.running
        if number is not None and is_promised:
            self.end(number)
        for name, version in episodes:
            if name not in self.ever:
                self.ever.add(name)
                self.waiting[name] = Waiting(version, unit, is_promised)
        self.drop_old()

    def sample(self, call: str, wanted: int, names: list[str]) -> None:
        """These were handed out."""
        assert len(set(names)) == len(names) == wanted
        self.sampled[call] = names
        self.sampled_at = max(self.sampled_at, self.version)
        for name in names:
            w = self.waiting[name]  # so it is not too old
            assert w.used_at < self.version
            w.uses, w.used_at = w.uses + 1, self.version
            self.uses[name] += 1
            assert self.uses[name] <= self.reuse
        for name, w in list(self.waiting.items()):  # used up, or not to be used at another version
            if w.uses and (w.uses == self.reuse or w.version + self.max_age <= self.version):
                del self.waiting[name]

    def loaded(self) -> "Model":
        """As it is after it was loaded."""
        new = copy.deepcopy(self)
        new.told, new.sampled, new.to_redo = None, {}, sorted(self.running)
        new.running = {number: (size, self.version) for number, (size, _) in self.running.items()}
        return new


@dataclass
class Op:
    call: str
    kind: str
    amount: int = 0  # episodes to admit; batch size to sample; the bound
    number: Any = None  # whose rollout ends
    episodes: list[tuple[str, int]] = field(default_factory=list)
    version: int = 0
    wait: bool = False
    state: Any = None  # to load, and what the model was then
    model: Model | None = None
    is_done: bool = False  # has had its effect
    answer: Any = None

    @property
    def group_id(self) -> str:
        return self.call if self.number is None else str(self.number)


class Life:
    """One buffer over many processes, with the model beside it."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        r = self.random
        dp, sync = r.choice([1, 2]), r.choice([1, 1, 2])
        age = r.randint(sync - 1, 3)
        self.settings = {
            "batch_size": r.randint(1, 3),
            "max_policy_age": age,
            "dp_size": dp,
            "sync_interval": sync,
            "reuse": r.randint(1, age + 1),
            "strategy": r.choice(["oldest", "newest", "prioritized"]),
        }
        self.dp = dp
        self.folder = folder
        self.file = folder / "replay_buffer.journal"
        self.model = Model(self.settings["batch_size"] * dp, age, sync, self.settings["reuse"], age)
        self.ops: list[Op] = []
        self.pending: list[tuple[Op, asyncio.Task[Any]]] = []
        self.num_ids = 0
        self.saved: tuple[dict[str, Any], Model] | None = None
        # where a kill in the middle of the last operation may leave things: size range of the file, model
        self.cuts: list[tuple[range, Model, Op]] = []

    async def run(self, num_ops: int) -> None:
        self.buffer = await started(self.folder, **self.settings)
        weights = {"admit": 4, "add": 4, "sample": 4, "restart": 0.7, "generating": 0.5, "bound": 0.3}
        weights |= {"load": 0.3, "save": 0.5, "repeat": 2, "kill": 1.5}
        for _ in range(num_ops):
            kind = self.random.choices(list(weights), list(weights.values()))[0]
            if kind == "kill":
                await self.kill()
            elif kind == "save":
                self.saved = await self.buffer.state_dict(), copy.deepcopy(self.model)
            elif kind == "repeat":
                await self.repeat(self.random.choice(self.ops[-12:])) if self.ops else None
            elif not any(op.kind == kind for op, _ in self.pending) and self.is_possible(kind):
                await self.do(self.new_op(kind))
            await self.compare()
        await self.kill()
        await self.compare()
        for task in [task for _, task in self.pending]:
            task.cancel()

    def is_possible(self, kind: str) -> bool:
        return bool({"restart": self.model.running, "load": self.saved}.get(kind, True))

    def new_op(self, kind: str) -> Op:
        r, model = self.random, self.model
        op = Op(f"call {len(self.ops)}", kind)
        if kind == "admit":
            op.amount = r.randint(1, 4)
        elif kind == "restart":
            op.number = r.choice(list(model.running))
        elif kind == "bound":
            op.amount = r.randint(model.sync - 1, model.max_age)
        elif kind == "load":
            assert self.saved is not None
            op.state, op.model = self.saved
        elif kind == "add":
            oldest = max(0, model.version - model.max_age - 1)
            if model.running and r.random() < 0.7:
                op.number = r.choice(list(model.running))
                num, oldest = model.running[op.number]
            else:
                num = r.randint(1, 5)
            for _ in range(max(1, num + r.choice([-1, 0, 0, 0, 0, 1]))):
                is_old = model.ever and r.random() < 0.1
                name = r.choice(sorted(model.ever)) if is_old else f"e{self.num_ids}"
                self.num_ids += 1
                op.episodes.append((name, r.randint(oldest, max(oldest, model.version))))
        elif kind == "generating":
            op.version = (model.version if model.told is None else model.told) + r.randint(1, 2)
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
            "restart": lambda: b.restart(op.number),
            "bound": lambda: b.bound(op.amount),
            "load": lambda: b.load_state_dict(copy.deepcopy(op.state)),
            "add": lambda: b.add(*(replace(episode(*e), group_id=op.group_id) for e in op.episodes)),
            "generating": lambda: b.generating(op.version),
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
            return not (self.model.to_redo or self.model.room(op.amount))
        return op.kind == "sample" and not self.model.ready(op.amount * self.dp)

    def check_answer(self, op: Op, task: asyncio.Task[Any]) -> None:
        """It must be done, with the effect that the model says."""
        assert task.done(), op
        op.is_done = True
        answer, model = task.result(), self.model
        if op.kind == "admit":
            assert answer == model.admit(op.amount)
        elif op.kind == "restart":
            assert op.number is not None and answer == model.restart(op.number)
        elif op.kind == "bound":
            model.bound = op.amount
        elif op.kind == "load":
            assert op.model is not None
            self.model = op.model.loaded()
        elif op.kind == "add":
            model.add(op.call, op.number, op.episodes)
        elif op.kind == "generating":
            model.told = op.version
        else:
            answer = ids(answer)
            model.sample(op.call, op.amount * self.dp, answer)
        assert op.answer in (None, answer)  # made again after a kill
        op.answer = answer

    async def check_pending(self) -> None:
        """What waits ends as soon as it can, and no sooner."""
        await settle()
        while went := [(op, task) for op, task in self.pending if task.done() and not self.would_wait(op)]:
            op, task = min(went, key=lambda pending: pending[0].kind)  # one may let the other go
            self.pending.remove((op, task))
            self.check_answer(op, task)
        for op, task in self.pending:
            assert not task.done() and self.would_wait(op), op

    async def repeat(self, op: Op) -> None:
        """The answer of an operation was lost: it is made again, under its old id."""
        if not op.is_done:
            if not self.pending:
                await self.do(op)
            return
        if op.kind == "sample" and op.call not in list(self.model.sampled)[-history.REMEMBERED_BATCHES :]:
            return
        task = self.start(op)
        await settle()
        assert task.done(), op
        if op.kind == "sample":
            assert ids(task.result()) == self.model.sampled[op.call]
            self.model.advance(op.version)
        else:
            assert task.result() == op.answer
        if op.kind == "generating":  # news only after a state was loaded
            self.model.told = max(self.model.told or 0, op.version)
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
        assert (info.version, info.next_number) == (model.version, model.next_number)
        assert info.num_running == len(model.running)
        waiting = sorted(e.episode_id for e in self.buffer._queue)
        assert waiting == sorted(model.waiting)
        fresh = [name for name, w in model.waiting.items() if not w.uses]
        assert (info.num_added, info.num_waiting) == (len(model.ever), len(fresh))
        assert (info.num_sampled, info.num_dropped) == (len(model.uses), len(model.dropped))
        assert info.num_reused == model.uses.total() - len(model.uses)
        assert sorted([*model.uses, *model.dropped, *fresh]) == sorted(model.ever)


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


@pytest.mark.parametrize("small_bytes", [4 * 2**20, 3000, 0])  # rewrites: never, at times, most of the time
def test_any_sequence_of_calls_and_kills_loses_nothing_and_counts_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    monkeypatch.setattr(journal, "SMALL_BYTES", small_bytes)
    for seed in range(40):
        try:
            asyncio.run(Life(seed, tmp_path / str(seed)).run(num_ops=50))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
