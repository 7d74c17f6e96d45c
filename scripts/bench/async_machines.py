"""Machines that sleep instead of computing, behind the controller's own services and dispatchers."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any
from unittest import mock

import torch
from async_costs import Costs

from forge.controller import ActorHandle, ForgeActor, Service, endpoint
from forge.controller.call import serving
from forge.controller.dispatcher import Dispatcher, Roster
from forge.controller.lane import Lane, Member
from forge.controller.options import ActorOptions
from forge.data_models import Completion, TrainInputs, TrainTargets

TOKENS_OF_ONE = 64
"""A token of an episode stands for so many: batches fit into memory, and their proportions stay."""


class Generator(ForgeActor):
    """Answers as slowly as its load asks for, and goes on with new weights in the midst of answers."""

    def __init__(self, costs: Costs, seed: int) -> None:
        self._costs, self._seed = costs, seed
        self._decoder = Decoder(costs)
        self.version = 0

    @endpoint
    async def generate(self, number: int) -> list[Completion]:
        """The answers to question `number`: always of the same lengths."""
        dice = Random(f"{self._seed}/{number}")
        lengths = [self._costs.lengths.draw(dice) for _ in range(self._costs.group_size)]
        versions = [0] * len(lengths)

        def begin(index: int) -> None:
            versions[index] = self.version

        await self._decoder.decode(lengths, begin)
        return [completion(n, version) for n, version in zip(lengths, versions, strict=True)]

    @endpoint
    async def update_weights(self, version: int) -> int:
        """Fetches beside the decoding, which stands still while the weights are put into place."""
        await asyncio.sleep(self._costs.fetch_s)
        self._decoder.pause()
        await asyncio.sleep(self._costs.load_s)
        self.version = version
        self._decoder.resume()
        return version


class Trainer(ForgeActor):
    """Stands for all its ranks: a step takes as long as the rank with the most tokens."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    @endpoint
    async def train_step(self, inputs: list[TrainInputs], targets: list[TrainTargets]) -> None:
        most = max(int(t.loss_mask.sum()) for t in targets) * TOKENS_OF_ONE
        await asyncio.sleep(most / self._costs.tokens_per_rank_s)

    @endpoint
    async def push_weights(self, version: int) -> None:
        await asyncio.sleep(self._costs.snapshot_s)

    @endpoint
    async def finish_push(self) -> None:
        await asyncio.sleep(self._costs.store_s)


class Decoder:
    """Continuous batching: all running sequences get a token per decoding step, which is the slower the more
    there are; those beyond `max_sequences` wait in order."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._loop = asyncio.get_running_loop()
        self._running: list[tuple[float, int, _Group]] = []  # a heap, by the progress at which each ends
        self._waiting: deque[tuple[int, int, _Group]] = deque()  # tokens, index in the group
        self._progress = 0.0  # decoding steps so far
        self._since = 0.0  # when progress was that
        self._is_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._serial = itertools.count()

    async def decode(self, lengths: Sequence[int], begin: Any) -> None:
        """Returns when all of a group have ended; `begin(i)` is called before the first token of the i-th."""
        group = _Group(len(lengths), begin, self._loop.create_future())
        self._waiting.extend((tokens, index, group) for index, tokens in enumerate(lengths))
        self._go_on()
        await group.done

    def pause(self) -> None:
        self._go_on()
        self._is_paused = True
        self._go_on()

    def resume(self) -> None:
        self._since = self._loop.time()
        self._is_paused = False
        self._go_on()

    @property
    def _seconds_per_step(self) -> float:
        return self._costs.step_s + self._costs.sequence_s * len(self._running)

    def _go_on(self) -> None:
        """Brings the progress up to now, ends what has ended, begins what can, and looks for the next end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_paused:
            return
        now = self._loop.time()
        self._progress += (now - self._since) / self._seconds_per_step
        self._since = now
        while self._running and self._running[0][0] <= self._progress + 1e-6:
            heapq.heappop(self._running)[2].end_one()
        while self._waiting and len(self._running) < self._costs.max_sequences:
            tokens, index, group = self._waiting.popleft()
            group.begin(index)
            heapq.heappush(self._running, (self._progress + tokens, next(self._serial), group))
        if self._running:
            left = self._running[0][0] - self._progress
            self._timer = self._loop.call_at(now + left * self._seconds_per_step, self._go_on)


class _Group:
    __slots__ = ("_num_left", "begin", "done")

    def __init__(self, num_left: int, begin: Any, done: "asyncio.Future[None]") -> None:
        self._num_left, self.begin, self.done = num_left, begin, done

    def end_one(self) -> None:
        self._num_left -= 1
        if not self._num_left and not self.done.done():
            self.done.set_result(None)


def completion(num_tokens: int, version: int) -> Completion:
    """What came of a sequence."""
    length = max(1, round(num_tokens / TOKENS_OF_ONE))
    return Completion(
        text="",
        token_ids=torch.zeros(length, dtype=torch.int64),
        logprobs=torch.zeros(length),
        prompt_ids=_PROMPT,
        generator_version=version,
    )


_PROMPT = torch.zeros(1, dtype=torch.int64)


def service_of(replicas: Sequence[ForgeActor], name: str) -> Service:
    """A service of actors in this process."""
    return Service(_Client(replicas, name))


def actor_of(actor: ForgeActor, name: str) -> ActorHandle:
    """A handle to an actor in this process."""
    return ActorHandle(_Client([actor], name))


class _LocalLane(Lane):
    """Calls an actor in this process, with nothing in between."""

    async def call_first(self, id: str, caller: str, method: str, args: tuple, kwargs: dict) -> Any:
        with serving(id):
            return await getattr(self.member.hosts, method)(*args, **kwargs)

    call_all = call_first


class _Client:
    """What a handle needs of its service; nothing starts, dies or scales here."""

    directory = None

    def __init__(self, actors: Sequence[ForgeActor], name: str) -> None:
        self.uid = name
        self.options = ActorOptions(type(actors[0]), num_replicas=len(actors), mesh_name=name)
        self._dispatcher = Dispatcher(
            name, self.options.router, max_concurrent=None, down_timeout_s=1.0, report_lost=_never
        )
        members = tuple(Member(i, 0, actor, num_procs=1) for i, actor in enumerate(actors))
        with mock.patch("forge.controller.dispatcher.Lane", _LocalLane):
            self._dispatcher.update(Roster(1, members))

    def dispatcher(self) -> Dispatcher:
        return self._dispatcher

    async def begin_fanout(self) -> None:
        """Nobody is down."""


def _never(member: Member, reason: str) -> None:
    raise AssertionError(f"replica {member.index} was lost: {reason}")
