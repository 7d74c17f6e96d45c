"""EngineLoop: continuous batching: calls that overlap share the steps of one engine."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from forge.controller.call import ledger
from forge.errors import ActorFailure, ForgeError

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


class EngineLoop:
    """Steps an engine, on its thread, as long as there is work; takes in new work between two steps.

    When the engine fails, all who wait and all later callers get an ActorFailure with the reason.
    """

    def __init__(self, engine: "Engine", run_blocking: Callable[..., Awaitable[Any]]) -> None:
        self._engine = engine
        self._run_blocking = run_blocking
        self._inbox: list[_Entry] = []
        self._running: dict[str, asyncio.Future[Any]] = {}
        self._waiting: set[asyncio.Future[Any]] = set()
        self._request_ids = map(str, itertools.count())
        self._task: asyncio.Task[None] | None = None
        self._failure: str | None = None

    async def generate(self, prompt_ids: list[int], sampling: "SamplingParams") -> "RequestOutput":
        """Runs a request to its end, or until the caller is cancelled: then no further step works on it."""
        request_id = next(self._request_ids)
        return await self._submit(partial(self._engine.add, request_id, prompt_ids, sampling), request_id)

    async def between_steps(self, action: Callable[[], None]) -> None:
        """Runs `action` on the engine's thread while no step is running.

        A ForgeError from it says that the engine is as before; any other error ends the loop. What a caller
        that was cancelled wanted isn't begun any more.
        """
        await self._submit(action)

    def fail(self, reason: str) -> None:
        """Raises ActorFailure at all who wait, and at whoever calls later."""
        self._failure = self._failure or reason
        for future in self._waiting:
            if not future.done():
                future.set_exception(ActorFailure(self._failure))

    async def _submit(self, action: Callable[[], None], request_id: str | None = None) -> Any:
        if self._failure is not None:
            raise ActorFailure(self._failure)
        entry = _Entry(action, asyncio.get_running_loop().create_future(), request_id)
        self._inbox.append(entry)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="engine loop")
        self._waiting.add(entry.future)
        try:
            return await entry.future
        finally:
            self._waiting.discard(entry.future)

    async def _run(self) -> None:
        """Until nothing is left to do. Its errors reach the callers through `fail`."""
        try:
            while (self._inbox or self._running) and self._failure is None:
                entries, self._inbox = self._inbox, []
                for future, outcome in await self._run_blocking(self._turn, entries):
                    if future.done():  # its caller has gone
                        continue
                    if isinstance(outcome, Exception):
                        future.set_exception(outcome)
                    else:
                        future.set_result(outcome)
        except Exception as error:  # translated, for everyone who waits
            logger.exception("the engine failed")
            self.fail(f"the generator's engine failed: {type(error).__name__}: {error}")

    def _turn(self, entries: list[_Entry]) -> list[tuple[asyncio.Future[Any], Any]]:
        """On the engine's thread: new work, then one step. Futures with their results or errors."""
        settled: list[tuple[asyncio.Future[Any], Any]] = []
        for entry in entries:
            if entry.future.cancelled():
                continue
            try:
                entry.action()
            except ForgeError as error:
                settled.append((entry.future, error))
                continue
            if entry.request_id is None:
                settled.append((entry.future, None))
            else:
                self._running[entry.request_id] = entry.future
        self._abort_abandoned()
        settled += [(self._running.pop(output.request_id), output) for output in self._engine.step()]
        ledger.moved()
        return settled

    def _abort_abandoned(self) -> None:
        """Nothing is sampled for callers that have gone."""
        abandoned = [request_id for request_id, future in self._running.items() if future.cancelled()]
        if abandoned:
            self._engine.abort(abandoned)
        for request_id in abandoned:
            del self._running[request_id]
