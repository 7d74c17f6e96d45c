"""WeightExchange: takes an engine to newer weights while it runs, and never back."""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from forge.errors import WeightsMissing
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

    stage: fetches a version on all ranks, waiting that many seconds for it to be complete; published: the
        complete versions in the store, ascending.
    """

    def __init__(
        self,
        engine: "Engine",
        loop: "EngineLoop",
        stage: Callable[[int, float], Awaitable[object]],
        published: Callable[[], Awaitable[list[int]]],
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._stage = stage
        self._published = published
        self._lock = asyncio.Lock()

    async def update(self, version: int) -> int:
        """Goes on with `version`, or with the one that is held where that is newer; returns which."""
        async with self._lock:
            held = self._engine.version
            if version < held:
                logger.info("update to version %d of the weights was overtaken: keeping %d", version, held)
            if version > held:
                await _to_the_end(self._exchange(version, _PUBLISH_LIMIT_S))
            return self._engine.version

    async def catch_up(self) -> int:
        """Goes on with the newest published version unless the one that is held is newer; returns which.

        A version that is retired between the list and the fetch gives way to what is listed then.
        """
        async with self._lock:
            while (newest := max(await self._published(), default=0)) > self._engine.version:
                try:
                    await _to_the_end(self._exchange(newest, 0))
                except WeightsMissing:
                    if newest in await self._published():
                        raise
            return self._engine.version

    async def _exchange(self, version: int, timeout_s: float) -> None:
        started = time.perf_counter()
        await self._stage(version, timeout_s)
        fetched = time.perf_counter()
        await self._loop.between_steps(functools.partial(self._engine.load, version))
        record("generator", fetch_s=fetched - started, load_s=time.perf_counter() - fetched)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work` also when the caller is cancelled: the next exchange would meet half of this one."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
