"""ForgeActor, the base of every machine in the loop, and `endpoint`, which marks what can be called."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from forge.controller.handle import ActorHandle
    from forge.controller.options import ActorOptions
    from forge.controller.service import Service


def endpoint(method: Callable[..., Any]) -> Callable[..., Any]:
    """Marks an `async def` method as callable through a handle or a service.

    Calls to one actor overlap: while one awaits, others run. Work that would block the event loop belongs
    in `self.run_blocking`.
    """
    if not asyncio.iscoroutinefunction(method):
        raise TypeError(f"endpoint {method.__qualname__} must be an `async def` method")
    method.__forge_endpoint__ = True  # type: ignore[attr-defined]
    return method


class ForgeActor:
    """A machine in the loop. Subclass it, mark methods with `@endpoint`, and start it with:

        policy = await MyActor.options(procs=1, num_replicas=2).as_service(**init_kwargs)
        trainer = await MyActor.options(procs=4, with_gpus=True).as_actor(**init_kwargs)

    The constructor runs in the actor's own process and should only keep its arguments; heavy work (loading
    a model) belongs in `setup`. What either raises is raised by `as_service` and `as_actor`.
    """

    rank: int = 0  # of this process in its mesh
    world_size: int = 1  # processes in the mesh
    peers: "ActorHandle"  # the whole mesh, this process included

    # Whether it keeps all cores busy (a model); others get one OpenMP thread.
    compute_bound: ClassVar[bool] = False
    # Whether rank 0 drives the other ranks itself, so that a routed call goes to rank 0 only.
    driver_only: ClassVar[bool] = False

    async def setup(self) -> None:
        """Loads what the actor needs, after the constructor of every rank has returned."""

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
    def options(
        cls,
        *,
        procs: int = 1,
        hosts: int | None = None,
        with_gpus: bool = False,
        num_replicas: int = 1,
        mesh_name: str | None = None,
        env: dict[str, str] | None = None,
    ) -> "ActorOptions[Self]":
        """Where and how often this actor runs.

        procs: processes of one replica (on each host); hosts: hosts of one replica, None for this one;
        with_gpus: one GPU for each process; env: environment variables of its processes.
        """
        from forge.controller.options import ActorOptions

        return ActorOptions(
            cls,
            procs=procs,
            hosts=hosts,
            with_gpus=with_gpus,
            num_replicas=num_replicas,
            mesh_name=mesh_name,
            env=dict(env or {}),
        )

    @classmethod
    async def as_service(cls, *args: Any, **kwargs: Any) -> "Service":
        """A service of one replica with default options; see `options`."""
        return await cls.options().as_service(*args, **kwargs)

    @classmethod
    async def as_actor(cls, *args: Any, **kwargs: Any) -> "ActorHandle":
        """One actor mesh with default options; see `options`."""
        return await cls.options().as_actor(*args, **kwargs)
