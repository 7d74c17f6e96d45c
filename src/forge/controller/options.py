"""ActorOptions: an actor class with where and how often it runs."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

from forge.controller.actor import ForgeActor
from forge.controller.router import LeastLoadedRouter, Router
from forge.errors import ConfigError

if TYPE_CHECKING:
    from forge.controller.handle import ActorHandle
    from forge.controller.service import Service

A = TypeVar("A", bound=ForgeActor)


class Options(TypedDict, total=False):
    """The keys of `ForgeActor.options`."""

    procs: int  # processes of one replica on each of its hosts, default 1
    hosts: int | None  # hosts of one replica, with `procs` processes on each; None: one
    with_gpus: bool  # one GPU for every process
    shares_gpus_with: str | None  # name of the service on whose GPUs it runs; None: on its own
    num_replicas: int  # default 1
    mesh_name: str | None  # name in logs and messages; that of the class by default
    env: dict[str, str] | None  # environment variables of its processes
    min_replicas: int | None  # with max_replicas: how far the number may follow the queue
    max_replicas: int | None
    max_concurrent: int | None  # calls that one replica runs at a time; None: all that come
    timeout_s: float | None  # deadline of a call that sets none itself; None: none
    health_poll_rate: float  # seconds between two health probes, default 2
    health_timeout_s: float  # a replica whose event loop does not answer so long is replaced, default 60
    start_timeout_s: float  # for constructor, setup and catch_up, default 1800
    down_timeout_s: float  # how long calls wait when all replicas are down, default 600
    router: Router  # chooses a replica; LeastLoadedRouter by default


@dataclass(frozen=True, slots=True)
class ActorOptions(Generic[A]):
    """What `ForgeActor.options(...)` returns; start the actor with `as_service` or `as_actor`."""

    cls: type[A]
    procs: int = 1
    hosts: int | None = None
    with_gpus: bool = False
    shares_gpus_with: str | None = None
    num_replicas: int = 1
    mesh_name: str | None = None
    env: dict[str, str] | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None
    max_concurrent: int | None = None
    timeout_s: float | None = None
    health_poll_rate: float = 2.0
    health_timeout_s: float = 60.0
    start_timeout_s: float = 1800.0
    down_timeout_s: float = 600.0
    router: Router = field(default_factory=LeastLoadedRouter)

    def __post_init__(self) -> None:
        for key in ("procs", "hosts", "num_replicas", "max_concurrent", "min_replicas", "max_replicas"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"{self.name}: {key} must be at least 1, got {value}")
        for key in ("timeout_s", "health_poll_rate", "health_timeout_s", "start_timeout_s", "down_timeout_s"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ConfigError(f"{self.name}: {key} must be above 0 seconds, got {value}")
        self._check_scaling()

    def _check_scaling(self) -> None:
        low, high = self.min_replicas, self.max_replicas
        if low is None and high is None:
            return
        if low is None or high is None or not low <= self.num_replicas <= high:
            raise ConfigError(
                f"{self.name}: min_replicas <= num_replicas <= max_replicas must hold, got {low}, "
                f"{self.num_replicas} and {high}: set both, or neither"
            )
        if self.max_concurrent is None:
            raise ConfigError(
                f"{self.name}: min_replicas and max_replicas follow the queue, and without max_concurrent "
                "there is none: set max_concurrent to the calls that one replica runs well at a time"
            )

    @property
    def name(self) -> str:
        """Name in logs and messages."""
        return self.mesh_name or self.cls.__name__.lower()

    async def as_service(self, *args: Any, **kwargs: Any) -> "Service":
        """Starts `num_replicas` replicas; returns when all have finished `setup`."""
        from forge.controller.runtime import Runtime

        return await Runtime.current().start_service(self, args, kwargs)

    async def as_actor(self, *args: Any, **kwargs: Any) -> "ActorHandle":
        """Starts one mesh of `procs` processes; returns when all have finished `setup`."""
        from forge.controller.runtime import Runtime

        if self.num_replicas != 1 or self.max_replicas not in (None, 1):
            raise ConfigError(
                f"{self.name}: an actor is one mesh, num_replicas={self.num_replicas} needs as_service()"
            )
        return await Runtime.current().start_actor(self, args, kwargs)
