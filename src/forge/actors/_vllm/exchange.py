"""WeightExchange: takes an engine to newer weights while it runs, and never back."""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from forge.errors import WeightsMismatch, WeightsMissing
from forge.observability import record

if TYPE_CHECKING:
    from forge.actors._vllm.engine import Engine
    from forge.actors._vllm.engine_loop import EngineLoop

logger = logging.getLogger(__name__)

_PUBLISH_LIMIT_S = 60.0  # an update may be told before the last rank of the trainer has published


class WeightExchange:
    """One exchange at a time, each carried to its end even when its caller gives up.

    An update that was overtaken by a newer one does nothing, so that a generator which caught up with newer
    weights keeps them. To go back on purpose, publish the old weights as a new version.

    Weights that aren't what was published, or not this model's, fence the generator off: it raises
    ReplicaUnfit instead of sampling, until an exchange has succeeded.

    name: of the generator, for errors; stage: fetches a version on all ranks, waiting that many seconds for
        it to be complete, proves it, and prepares it; published: the complete versions in the store,
        ascending; newest_lost: the newest version that was complete and is lost, and why; when_idle: whether
        running requests end before an exchange.
    """

    def __init__(
        self,
        engine: "Engine",
        loop: "EngineLoop",
        stage: Callable[[int, float], Awaitable[object]],
        published: Callable[[], Awaitable[list[int]]],
        newest_lost: Callable[[], Awaitable[tuple[int, str] | None]],
        *,
        name: str = "the generator",
        when_idle: bool = False,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._stage = stage
        self._published = published
        self._newest_lost = newest_lost
        self._name = name
        self._when_idle = when_idle
        self._is_fenced = False
        self._lock = asyncio.Lock()

    @property
    def held(self) -> int | None:
        """The version that the next token is sampled from; None while there may be no next token."""
        return None if self._is_fenced else self._engine.version

    async def update(self, version: int) -> int:
        """Goes on with `version`, or with the one that is held where that is newer; returns which."""
        async with self._lock:
            held = self.held
            if held is not None and version < held:
                logger.info("update to version %d of the weights was overtaken: keeping %d", version, held)
            if held is None or version > held:
                await _to_the_end(self._exchange(version, _PUBLISH_LIMIT_S))
            return self._engine.version

    async def catch_up(self) -> int:
        """Goes on with the newest published version unless the one that is held is newer; returns which.

        A version that is retired between the list and the fetch gives way to what is listed then. Raises
        WeightsMissing where a newer one is lost: what is left may be so old that the trainer takes no
        episode of it, for ever.
        """
        async with self._lock:
            while (newest := max(await self._published(), default=0)) > (self.held or 0):
                try:
                    await _to_the_end(self._exchange(newest, 0))
                except WeightsMissing:
                    if newest in await self._published():
                        raise
            lost = await self._newest_lost()
            if lost is not None and lost[0] > (self.held or 0):
                raise WeightsMissing(f"version {lost[0]} of the weights was published and is lost: {lost[1]}")
            return self._engine.version

    async def _exchange(self, version: int, timeout_s: float) -> None:
        started = time.perf_counter()
        try:
            await self._stage(version, timeout_s)
            staged = time.perf_counter()
            load = functools.partial(self._engine.load, version)
            await self._loop.between_steps(load, when_idle=self._when_idle)
        except WeightsMismatch as error:
            told = f"{self._name}: {error}"
            self._is_fenced = True
            self._loop.suspend(f"it serves no more, its weights are not proven: {told}")
            raise WeightsMismatch(told) from None
        self._is_fenced = False
        self._loop.resume()
        record("generator", stage_s=staged - started, load_s=time.perf_counter() - staged)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work` also when the caller is cancelled: the next exchange would meet half of this one."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
