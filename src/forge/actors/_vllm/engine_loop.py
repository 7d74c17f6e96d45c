"""EngineLoop: continuous batching: calls that overlap share the steps of one engine."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from forge.controller.call import ledger
from forge.errors import ActorFailure, ForgeError, ReplicaUnfit

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

    from forge.actors._vllm.engine import Engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Work for between two steps. A request is answered when it is finished, a change when it is made."""

    action: Callable[[], None]
    future: asyncio.Future[Any]
    request_id: str | None = None
    when_idle: bool = False


class EngineLoop:
    """Steps an engine, on its thread, as long as there is work; takes in new work between two steps.

    When the engine fails, all who wait and all later callers get an ActorFailure with the reason. While it
    is suspended, changes are made but nothing is sampled; a change that fails suspends it.

    While it is asleep, nothing is sampled either, but callers wait for it to wake; changes are made.

    one_at_a_time: a request begins when the one before has ended; changes don't wait for that.
    """

    def __init__(
        self, engine: "Engine", run_blocking: Callable[..., Awaitable[Any]], *, one_at_a_time: bool = False
    ) -> None:
        self._engine = engine
        self._run_blocking = run_blocking
        self._one_at_a_time = one_at_a_time
        self._inbox: list[_Entry] = []
        self._held_back: list[_Entry] = []  # until running requests have ended, or the engine wakes
        self._running: dict[str, asyncio.Future[Any]] = {}
        self._waiting: dict[asyncio.Future[Any], _Entry] = {}
        self._request_ids = map(str, itertools.count())
        self._task: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._suspension: str | None = None
        self._is_asleep = False
        self._failed_change: ForgeError | None = None  # in the last turn

    async def generate(self, prompt_ids: list[int], sampling: "SamplingParams") -> "RequestOutput":
        """Runs a request to its end, or until the caller is cancelled: then no further step works on it."""
        if self._suspension is not None:
            raise ReplicaUnfit(self._suspension)
        request_id = next(self._request_ids)
        return await self._submit(partial(self._engine.add, request_id, prompt_ids, sampling), request_id)

    async def between_steps(self, action: Callable[[], None], *, when_idle: bool = False) -> None:
        """Runs `action` on the engine's thread while no step is running.

        After a ForgeError from it, which the caller gets, the loop is suspended: the change may be half made.
        Any other error ends the loop. What a caller that was cancelled wanted isn't begun any more.
        when_idle: requests that run are finished before, and later ones wait.
        """
        await self._submit(action, when_idle=when_idle)

    async def sleep(self, *, when_idle: bool = False) -> None:
        """Makes no further step until `wake`, and gives back what the engine can do without until then.

        Where it is asleep already, nothing is done. when_idle: as for `between_steps`.
        """
        await self.between_steps(self._fall_asleep, when_idle=when_idle)

    async def wake(self) -> None:
        """Goes on with the requests that were running, and those that came meanwhile."""
        await self.between_steps(self._wake_up)

    def suspend(self, reason: str) -> None:
        """Raises ReplicaUnfit at all who wait for tokens, and at whoever asks for some until `resume`."""
        self._suspension = reason
        for future, entry in self._waiting.items():
            if entry.request_id is not None and not future.done():
                future.set_exception(ReplicaUnfit(reason))

    def resume(self) -> None:
        """Ends a suspension."""
        self._suspension = None

    def fail(self, reason: str) -> None:
        """Raises ActorFailure at all who wait, and at whoever calls later."""
        self._failure = self._failure or reason
        for future in self._waiting:
            if not future.done():
                future.set_exception(ActorFailure(self._failure))

    async def _submit(
        self, action: Callable[[], None], request_id: str | None = None, *, when_idle: bool = False
    ) -> Any:
        if self._failure is not None:
            raise ActorFailure(self._failure)
        entry = _Entry(action, asyncio.get_running_loop().create_future(), request_id, when_idle)
        self._inbox.append(entry)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="engine loop")
        self._waiting[entry.future] = entry
        try:
            return await entry.future
        finally:
            del self._waiting[entry.future]

    async def _run(self) -> None:
        """Until nothing is left to do. Its errors reach the callers through `fail`."""
        try:
            while self._has_work and self._failure is None:
                entries, self._inbox = [*self._held_back, *self._inbox], []
                for future, outcome in await self._run_blocking(self._turn, entries):
                    if future.done():  # its caller has gone, or was told otherwise
                        continue
                    if isinstance(outcome, Exception):
                        future.set_exception(outcome)
                    else:
                        future.set_result(outcome)
                if self._failed_change is not None:
                    self.suspend(f"it serves no more: {self._failed_change}")
        except Exception as error:  # translated, for everyone who waits
            logger.exception("the engine failed")
            self.fail(f"the generator's engine failed: {type(error).__name__}: {error}")

    @property
    def _has_work(self) -> bool:
        return bool(self._inbox or ((self._held_back or self._running) and not self._is_asleep))

    def _fall_asleep(self) -> None:
        if not self._is_asleep:
            self._engine.sleep()
            self._is_asleep = True

    def _wake_up(self) -> None:
        if self._is_asleep:
            self._engine.wake()
            self._is_asleep = False

    def _must_wait(self, entry: _Entry) -> bool:
        """Whether a request can't begin now."""
        is_alone = self._one_at_a_time and bool(self._running)
        return entry.request_id is not None and (self._is_asleep or is_alone)

    def _turn(self, entries: list[_Entry]) -> list[tuple[asyncio.Future[Any], Any]]:
        """On the engine's thread: new work, then one step. Futures with their results or errors."""
        settled: list[tuple[asyncio.Future[Any], Any]] = []
        self._abort_abandoned()
        self._held_back, self._failed_change = [], None
        for place, entry in enumerate(entries):
            if entry.future.done():
                continue
            if entry.when_idle and self._running:
                self._held_back += entries[place:]
                break
            if self._must_wait(entry):
                self._held_back.append(entry)
                continue
            try:
                entry.action()
            except ForgeError as error:
                settled.append((entry.future, error))
                if entry.request_id is None:  # no step with what it has left
                    self._held_back += entries[place + 1 :]
                    self._failed_change = error
                    return settled
                continue
            if entry.request_id is None:
                settled.append((entry.future, None))
            else:
                self._running[entry.request_id] = entry.future
        if not self._is_asleep:
            settled += [(self._running.pop(output.request_id), output) for output in self._engine.step()]
        ledger.moved()
        return settled

    def _abort_abandoned(self) -> None:
        """Nothing is sampled for callers that have gone."""
        abandoned = [request_id for request_id, future in self._running.items() if future.done()]
        if abandoned:
            self._engine.abort(abandoned)
        for request_id in abandoned:
            del self._running[request_id]
