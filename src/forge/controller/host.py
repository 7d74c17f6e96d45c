"""ActorHost: the Monarch actor that holds one ForgeActor and forwards calls to it."""

import asyncio
import functools
import os
import pickle
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import cloudpickle

from forge.controller._monarch import Actor, concurrent_endpoint, current_rank, current_size
from forge.controller.actor import ForgeActor
from forge.errors import ActorFailure
from forge.observability import metrics
from forge.observability.logs import configure_logging


def travels(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Lets only exceptions leave that the caller can unpickle, with the traceback of this process as a note.

    Monarch loses the reply of an endpoint whose exception can't be pickled: the caller would wait for ever.
    """

    @functools.wraps(method)
    async def wrapper(self: "ActorHost", *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(self, *args, **kwargs)
        except Exception as error:  # translated, and always raised again
            where = (
                f"raised in {self.name} (pid {os.getpid()}):\n{''.join(traceback.format_exception(error))}"
            )
            try:
                pickle.loads(cloudpickle.dumps(error))
            except Exception:  # whatever its pickling does, the words must arrive
                error = ActorFailure(f"{type(error).__name__}: {error}")
            error.add_note(where)
            raise error from None

    return wrapper


class ActorHost(Actor):
    """One process's seat for a ForgeActor. Every endpoint is concurrent, so that calls overlap."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._actor: ForgeActor | None = None

    @concurrent_endpoint
    @travels
    async def construct(self, cls: type[ForgeActor], args: tuple, kwargs: dict[str, Any], peers: Any) -> int:
        """Builds the ForgeActor; returns this process's id."""
        configure_logging()
        actor = cls.__new__(cls)
        actor.rank = current_rank().rank
        actor.world_size = functools.reduce(int.__mul__, current_size().values(), 1)
        actor.peers = peers
        actor.__init__(*args, **kwargs)
        self._actor = actor
        return os.getpid()

    @concurrent_endpoint
    @travels
    async def setup(self) -> None:
        await self._held.setup()

    @concurrent_endpoint
    @travels
    async def invoke(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs one endpoint of the ForgeActor."""
        try:
            return await getattr(self._held, method)(*args, **kwargs)
        except asyncio.CancelledError:
            raise ActorFailure(f"{self.name}.{method} was cancelled: the actor is being stopped") from None

    @concurrent_endpoint
    @travels
    async def drain_metrics(self) -> dict[str, metrics.Stat]:
        """Everything recorded in this process since the last call."""
        return metrics.drain()

    @concurrent_endpoint
    @travels
    async def teardown(self) -> None:
        if self._actor is not None:
            await self._actor.teardown()

    @property
    def _held(self) -> ForgeActor:
        assert self._actor is not None, "construct() comes first"
        return self._actor
