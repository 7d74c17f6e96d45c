"""Service: several replicas of one actor behind route, fanout and session."""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Self

from forge.controller.actor import ForgeActor, endpoint_of
from forge.controller.call import Outgoing, ledger
from forge.controller.client import Client, client_of
from forge.controller.dispatcher import MAX_ATTEMPTS
from forge.controller.lane import Lane, LaneLost
from forge.controller.session import current_session, open_session
from forge.errors import FanoutError, ForgeError, ReplicaLost

if TYPE_CHECKING:
    from forge.controller.replica import ReplicaStatus

_UNSET: Any = object()


class Handle:
    """What services and single actors have in common. It can be passed to any actor and used there: calls go
    straight to a replica, and the handle learns of replicas that come and go."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __reduce__(self) -> tuple:
        client = self._client
        return _rebuild, (
            type(self),
            client.uid,
            client.options,
            client.directory,
            client.dispatcher().roster,
        )

    @property
    def _cls(self) -> type[ForgeActor]:
        return self._client.options.cls

    @property
    def _name(self) -> str:
        return self._client.options.name

    async def replicas(self) -> "list[ReplicaStatus]":
        """State, weights version, load and restarts of each replica, as of now."""
        return await self._client.replicas()

    async def shutdown(self) -> None:
        """Stops all its processes. Only the process that started it can do so."""
        await self._client.close()


def _rebuild(kind: type[Handle], uid: str, options: Any, directory: Any, roster: Any) -> Handle:
    return kind(client_of(uid, options, directory, roster))


class Service(Handle):
    """Endpoints of a replicated actor, as attributes with the verbs route and fanout.

    completions = await policy.generate.route(prompt)     # one healthy replica
    await policy.update_weights.fanout(version)           # all of them
    async with policy.session(): ...                      # the same replica for every route inside
    await policy.generate.options(timeout_s=5).route(p)   # with a deadline
    """

    def __getattr__(self, name: str) -> "ServiceEndpoint":
        if name.startswith("_"):
            raise AttributeError(name)
        endpoint_of(self._cls, name)
        return ServiceEndpoint(self._client, name)

    def __repr__(self) -> str:
        return f"<service {self._name}: {self._cls.__name__}>"

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Every `route` of this service inside the block, and in tasks started there, goes to one replica:
        the one that the first call gets. When that is lost the session moves to another, which the log says.
        """
        with open_session(self._client.uid):
            yield

    async def scale(self, num_replicas: int) -> None:
        """Starts replicas, or lets some go once they have finished what they run; returns when that is done.

        Raises NotEnoughGPUs, or what a new replica's start raises; the others go on as before.
        """
        await self._client.scale(num_replicas)


class Endpoint:
    """One endpoint of a service or an actor."""

    def __init__(self, client: Client, method: str) -> None:
        self._client = client
        self._method = method
        self._timeout_s = client.options.timeout_s
        self._retry = endpoint_of(client.options.cls, method).retry

    def options(self, *, timeout_s: float | None = _UNSET, retry: bool | None = None) -> Self:
        """The same endpoint for a call with a deadline of its own (CallTimeout; the call is cancelled), or
        with another say on whether it is repeated when its replica is lost."""
        changed = copy.copy(self)
        if timeout_s is not _UNSET:
            changed._timeout_s = timeout_s
        if retry is not None:
            changed._retry = retry
        return changed

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """One call on the least loaded replica, or on the session's; rank 0's value."""
        session = current_session(self._client.uid)
        retry = self._retry is not False
        return await self._run(self._send(args, kwargs), session=session, retry=retry)

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The call on every replica at once; results in order of the replicas.

        A replica that is down meanwhile is left out when its class catches up by itself (`catch_up`).
        FanoutError when any other failed: it names each, and `results` holds what the rest returned by index.
        """
        send, dispatcher, lost = self._send(args, kwargs), self._client.dispatcher(), ""
        for _ in range(MAX_ATTEMPTS if self._retry is not False else 1):
            await dispatcher.reachable(self._method, self._timeout_s, all_of_them=not self._catches_up)
            await self._client.begin_fanout()
            lanes = list(dispatcher.lanes)
            calls = (dispatcher.run_on(lane, self._method, send, self._timeout_s) for lane in lanes)
            outcomes = dict(
                zip(
                    (lane.index for lane in lanes),
                    await asyncio.gather(*calls, return_exceptions=True),
                    strict=True,
                )
            )
            for index, outcome in list(outcomes.items()):
                if isinstance(outcome, LaneLost):
                    lost = f"replica {index}: {outcome}"
                    if self._catches_up:
                        del outcomes[index]
                    else:
                        outcomes[index] = ReplicaLost(f"its process is gone ({outcome})")
            if outcomes:
                return self._results(outcomes)
        raise ReplicaLost(
            f"{self._client.options.name}.{self._method}: all replicas were lost, last {lost}; this call may "
            "be what kills them"
        )

    def _results(self, outcomes: dict[int, Any]) -> list[Any]:
        failed = {i: outcome for i, outcome in outcomes.items() if isinstance(outcome, BaseException)}
        if not failed:
            return list(outcomes.values())
        first = next(iter(failed.values()))
        if len(outcomes) == 1:
            raise first
        told = "; ".join(f"replica {i}: {type(e).__name__}: {first_line(e)}" for i, e in failed.items())
        failure = FanoutError(
            f"{self._client.options.name}.{self._method}: {len(failed)} of {len(outcomes)} replicas failed: "
            f"{told}"
        )
        failure.results = {i: outcome for i, outcome in outcomes.items() if i not in failed}
        raise failure from first

    @property
    def _catches_up(self) -> bool:
        return self._client.options.cls.catch_up is not ForgeActor.catch_up

    def _send(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """How a routed call goes over a lane: to the rank that drives, or to all with rank 0's value."""
        options, method = self._client.options, self._method

        async def to_first(lane: Lane, call: Outgoing) -> Any:
            return await lane.call_first(call.id, caller_of(call), method, args, kwargs)

        async def to_all(lane: Lane, call: Outgoing) -> Any:
            values = await lane.call_all(call.id, caller_of(call), method, args, kwargs)
            return next(iter(values.items()))[1]

        return to_first if options.procs == 1 or options.cls.driver_only else to_all

    async def _run(self, send: Any, *, session: Any = None, retry: bool) -> Any:
        return await self._client.dispatcher().run(
            self._method, send, session=session, retry=retry, timeout_s=self._timeout_s
        )


class ServiceEndpoint(Endpoint):
    """One endpoint of a service."""

    def __getattr__(self, verb: str) -> Any:
        if verb in ("call", "call_one", "choose", "broadcast"):
            raise ForgeError(
                f"{self._client.options.name} is a service, .{verb} is for one actor: use "
                f".{self._method}.route (one replica) or .fanout (all of them)"
            )
        raise AttributeError(verb)


def caller_of(call: Outgoing) -> str:
    return f"{ledger.actor}/{call.task}" if call.parent is None else ledger.actor


def first_line(error: BaseException) -> str:
    """The first line with words in it."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
