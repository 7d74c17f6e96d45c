"""Service: several replicas of one actor behind route, fanout and session."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from forge.controller.actor import ForgeActor
from forge.controller.handle import check_endpoint, first_line
from forge.controller.mesh import Mesh
from forge.controller.replica import Replica, ReplicaState
from forge.controller.router import LeastLoadedRouter
from forge.errors import ActorFailure, FanoutError, ForgeError

_NO_SESSIONS: Mapping[int, Replica] = MappingProxyType({})
_sessions: ContextVar[Mapping[int, Replica]] = ContextVar("forge_sessions", default=_NO_SESSIONS)


class Service:
    """Endpoints of a replicated actor, as attributes with the verbs route and fanout.

    completions = await policy.generate.route(prompt)     # one healthy replica
    await policy.update_weights.fanout(version)           # all of them
    async with policy.session(): ...                      # the same replica for every route inside
    """

    def __init__(self, name: str, cls: type[ForgeActor], meshes: Sequence[Mesh]) -> None:
        self._name = name
        self._cls = cls
        self._replicas = [Replica(index, mesh) for index, mesh in enumerate(meshes)]
        self._router = LeastLoadedRouter()

    def __getattr__(self, name: str) -> "ServiceEndpoint":
        if name.startswith("_"):
            raise AttributeError(name)
        return ServiceEndpoint(self, check_endpoint(self._cls, name))

    def __repr__(self) -> str:
        return f"<service {self._name}: {self._cls.__name__} x {len(self._replicas)}>"

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Every `route` of this service inside the block goes to one replica; other services are free."""
        chosen = self._router.choose(self._healthy())
        token = _sessions.set({**_sessions.get(), id(self): chosen})
        try:
            yield
        finally:
            _sessions.reset(token)

    async def shutdown(self) -> None:
        """Stops all replicas."""
        from forge.controller.runtime import Runtime

        await Runtime.current().close(self)

    def _healthy(self) -> list[Replica]:
        healthy = [r for r in self._replicas if r.state is ReplicaState.HEALTHY]
        if not healthy:
            raise ActorFailure(f"{self!r}: all {len(self._replicas)} replicas have lost their processes")
        return healthy

    def _pick(self) -> Replica:
        return _sessions.get().get(id(self)) or self._router.choose(self._healthy())


class ServiceEndpoint:
    """One endpoint of a service."""

    def __init__(self, service: Service, method: str) -> None:
        self._service = service
        self._method = method

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """One call on the least loaded replica (inside a session: on the session's replica)."""
        return await self._service._pick().call(self._method, args, kwargs)

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The call on every replica at once; results in order of the replicas.

        FanoutError when any failed: it names each, and `results` holds what the others returned by index.
        """
        replicas = self._service._replicas
        outcomes = await asyncio.gather(
            *(r.call(self._method, args, kwargs) for r in replicas), return_exceptions=True
        )
        failed = {r.index: o for r, o in zip(replicas, outcomes, strict=True) if isinstance(o, BaseException)}
        if not failed:
            return outcomes
        if len(replicas) == 1:
            raise failed[0]
        told = "; ".join(
            f"replica {i}: {type(error).__name__}: {first_line(error)}" for i, error in failed.items()
        )
        failure = FanoutError(
            f"{self._service._name}.{self._method}: {len(failed)} of {len(replicas)} replicas failed: {told}"
        )
        failure.results = {
            r.index: o for r, o in zip(replicas, outcomes, strict=True) if r.index not in failed
        }
        raise failure from next(iter(failed.values()))

    def __getattr__(self, verb: str) -> Any:
        if verb in ("call", "call_one", "choose", "broadcast"):
            raise ForgeError(
                f"{self._service!r} is a service, .{verb} is for one actor: use "
                f".{self._method}.route (one replica) or .fanout (all of them)"
            )
        raise AttributeError(verb)
