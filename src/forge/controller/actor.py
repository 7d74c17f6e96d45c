"""ForgeActor, the base of every machine in the loop, and `endpoint`, which marks what can be called."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, Unpack, overload

if TYPE_CHECKING:
    from forge.controller.handle import ActorHandle
    from forge.controller.options import ActorOptions, Options
    from forge.controller.peers import Peers
    from forge.controller.service import Service

E = TypeVar("E", bound=Callable[..., Any])


@overload
def endpoint(method: E) -> E: ...
@overload
def endpoint(*, retry: bool | None = None) -> Callable[[E], E]: ...
def endpoint(method: Any = None, *, retry: bool | None = None) -> Any:
    """Marks an `async def` method as callable through a handle or a service.

    Calls to one actor overlap: while one awaits, others run. Work that would block the event loop belongs
    in `self.run_blocking`.

    retry: whether a call that was lost with its replica is made again, on another replica or on the one that
    takes its place. By default `route` does so and the other verbs don't. Say False when the work must not be
    done twice, True when the actor sees to that itself (see `forge.controller.call_id`).
    """
    if method is None:
        return functools.partial(endpoint, retry=retry)
    if not asyncio.iscoroutinefunction(method):
        raise TypeError(f"endpoint {method.__qualname__} must be an `async def` method")
    method.__forge_endpoint__ = EndpointMark(retry)  # type: ignore[attr-defined]
    return method


@dataclass(frozen=True, slots=True)
class EndpointMark:
    """What `@endpoint` says of a method."""

    retry: bool | None


def endpoint_of(cls: type["ForgeActor"], name: str) -> EndpointMark:
    """What a class says of an endpoint; an AttributeError that lists those it has when there is none."""
    found = getattr(getattr(cls, name, None), "__forge_endpoint__", None)
    if found is None:
        raise AttributeError(f"{cls.__name__} has no endpoint {name!r}; it has {', '.join(cls.endpoints())}")
    return found


class ForgeActor:
    """A machine in the loop. Subclass it, mark methods with `@endpoint`, and start it with:

        policy = await MyActor.options(procs=1, num_replicas=2).as_service(**init_kwargs)
        trainer = await MyActor.options(procs=4, with_gpus=True).as_actor(**init_kwargs)

    The constructor runs in the actor's own process and should only keep its arguments; heavy work (loading
    a model) belongs in `setup`. What either raises is raised by `as_service` and `as_actor`.
    """

    rank: int = 0  # of this process in its mesh
    world_size: int = 1  # processes in the mesh
    replica: int = 0  # number of this mesh in its service
    generation: int = 0  # how often this replica was replaced
    peers: "Peers"  # the whole mesh, this process included
    # A folder on this host that outlives the process and is there again for the one that replaces it, until
    # the service is shut down; see `forge.controller.journal`. None outside of a service.
    state_dir: Path | None = None

    # Whether it keeps all cores busy (a model); others get one OpenMP thread.
    compute_bound: ClassVar[bool] = False
    # Whether rank 0 drives the other ranks itself, so that a routed call goes to rank 0 only.
    driver_only: ClassVar[bool] = False
    # Whether a single actor (`as_actor`) is replaced when its process dies: it has no state, or it finds its
    # state again in `setup` or `catch_up`. Replicas of a service are always replaced.
    recovers: ClassVar[bool] = False

    async def setup(self) -> None:
        """Loads what the actor needs, after the constructor of every rank has returned."""

    @property
    def weights_version(self) -> int | None:
        """Version of the weights that it works with, for `replicas()` to show; None where there are none."""
        return None

    async def catch_up(self) -> None:
        """Brings the actor to the state that its service is in.

        Runs on every rank after `setup`, at the first start and whenever the actor takes the place of a lost
        one or joins a running service, and again when a `fanout` went to the others meanwhile. It takes
        no call before this has returned. A class that overrides it can miss a `fanout` while it is down:
        this makes up for it.
        """

    async def teardown(self) -> None:
        """Frees what `setup` took; called once, when the actor is stopped in an orderly way."""

    @classmethod
    async def prepare(cls) -> None:
        """Runs in the root process before the first actor of this class starts; may open a store, say."""

    @classmethod
    def bootstrap_env(cls) -> dict[str, str]:
        """Environment variables that its processes need before anything heavy is imported."""
        return {}

    @classmethod
    def endpoints(cls) -> list[str]:
        """Names of the endpoint methods."""
        return sorted(n for n in dir(cls) if getattr(getattr(cls, n, None), "__forge_endpoint__", False))

    @functools.cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix=type(self).__name__)

    async def run_blocking(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs blocking work on this actor's one compute thread, in order of the calls.

        One thread, because an OpenMP pool belongs to the thread that made it, and because the event loop
        stays free to answer other calls.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, functools.partial(function, *args, **kwargs))

    @classmethod
    def options(cls, **options: "Unpack[Options]") -> "ActorOptions[Self]":
        """Where and how often this actor runs; see `forge.controller.options.Options` for the keys."""
        from forge.controller.options import ActorOptions

        return ActorOptions(cls, **options)

    @classmethod
    async def as_service(cls, *args: Any, **kwargs: Any) -> "Service":
        """A service of one replica with default options; see `options`."""
        return await cls.options().as_service(*args, **kwargs)

    @classmethod
    async def as_actor(cls, *args: Any, **kwargs: Any) -> "ActorHandle":
        """One actor mesh with default options; see `options`."""
        return await cls.options().as_actor(*args, **kwargs)
