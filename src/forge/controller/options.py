"""ActorOptions: an actor class with where and how often it runs."""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from forge.controller.actor import ForgeActor
from forge.controller.handle import ActorHandle
from forge.controller.runtime import Runtime
from forge.controller.service import Service
from forge.errors import ConfigError

A = TypeVar("A", bound=ForgeActor)


@dataclass(frozen=True, slots=True)
class ActorOptions(Generic[A]):
    """What `ForgeActor.options(...)` returns; start the actor with `as_service` or `as_actor`."""

    cls: type[A]
    procs: int = 1
    hosts: int | None = None
    with_gpus: bool = False
    num_replicas: int = 1
    mesh_name: str | None = None
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("procs", "num_replicas"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{self.name}: {key} must be at least 1, got {getattr(self, key)}")
        if self.hosts is not None:
            raise ConfigError(
                f"{self.name}: hosts={self.hosts}, but actors start on this host only: leave hosts out"
            )

    @property
    def name(self) -> str:
        return self.mesh_name or self.cls.__name__.lower()

    async def as_service(self, *args: Any, **kwargs: Any) -> Service:
        """Starts `num_replicas` replicas; returns when all have finished `setup`."""
        return await Runtime.current().start_service(self, args, kwargs)

    async def as_actor(self, *args: Any, **kwargs: Any) -> ActorHandle:
        """Starts one mesh of `procs` processes; returns when all have finished `setup`."""
        if self.num_replicas != 1:
            raise ConfigError(
                f"{self.name}: an actor is one mesh, num_replicas={self.num_replicas} needs as_service()"
            )
        return await Runtime.current().start_actor(self, args, kwargs)
