"""Ledger: the hosts of a run, what each has, and who holds it. Arithmetic only; nothing is started here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge.errors import ConfigError, NotEnoughGPUs

if TYPE_CHECKING:
    from forge.controller._monarch import HostMesh
    from forge.controller.options import ActorOptions


@dataclass(slots=True, eq=False)
class Host:
    """One host. GPUs are known by what CUDA_VISIBLE_DEVICES takes: "0", "GPU-5ee1...", "MIG-..."."""

    name: str
    gpus: list[str]
    num_cores: int
    ip: str = "127.0.0.1"  # at which the processes of other hosts reach it
    is_this_machine: bool = True  # its processes have pids here
    mesh: "HostMesh | None" = None  # Monarch's; None before it is started
    worker: str | None = None  # where Monarch attaches to it; None for the host of the root process
    is_gone: bool = False
    is_replacement: bool = False  # of one that was lost
    num_procs: int = 0
    free: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.free = list(self.gpus)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one service wants."""

    name: str
    procs: int  # of one replica on each of its hosts
    num_hosts: int
    with_gpus: bool  # one for each process
    num_replicas: int
    compute_bound: bool

    @classmethod
    def of(cls, options: "ActorOptions[Any]") -> "Demand":
        """That of a service with these options."""
        return cls(
            options.name,
            options.procs,
            options.hosts or 1,
            options.with_gpus,
            options.num_replicas,
            options.cls.compute_bound,
        )

    @property
    def gpus_per_host(self) -> int:
        """GPUs that a replica takes on each of its hosts."""
        return self.procs if self.with_gpus else 0

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.gpus_per_host * self.num_hosts * self.num_replicas


@dataclass(slots=True, eq=False)
class Place:
    """Where one replica runs, and what it holds there until it is given back."""

    hosts: list[Host]
    gpus_by_host: list[list[str]]
    procs: int  # on each host
    is_held: bool = True

    @property
    def gpus(self) -> list[str]:
        """Of all its processes, in rank order; empty without GPUs."""
        return [gpu for gpus in self.gpus_by_host for gpu in gpus]

    @property
    def is_gone(self) -> bool:
        """Whether a host under it is."""
        return any(host.is_gone for host in self.hosts)

    def num_threads(self, *, compute_bound: bool) -> int:
        """OpenMP threads of each process: its share of the cores where it keeps them busy."""
        return max(1, min(h.num_cores for h in self.hosts) // self.procs) if compute_bound else 1


class Ledger:
    """Who holds what on which host."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = list(hosts)
        self._plan: dict[str, list[Place]] = {}

    @property
    def alive(self) -> list[Host]:
        """The hosts that are not gone."""
        return [host for host in self.hosts if not host.is_gone]

    def plan(self, demands: Sequence[Demand]) -> dict[str, list[Place]]:
        """Finds a place for every replica of a run, the largest first, and keeps it for when it starts.

        Raises NotEnoughGPUs with the arithmetic where one finds none, and then keeps nothing.
        """
        self._drop_plan()
        _check_sum(demands, self.alive)
        try:
            for demand in sorted(demands, key=lambda demand: -demand.gpus_per_host):
                self._plan[demand.name] = self._place_all(demand, demand.num_replicas)
        except ConfigError:
            self._drop_plan()
            raise
        return {demand.name: list(self._plan[demand.name]) for demand in demands}

    def reserve(self, demand: Demand, num_replicas: int) -> list[Place]:
        """A place for each of so many replicas: those planned for it, then others. All of them or none."""
        planned = self._plan.pop(demand.name, [])
        fits = [p for p in planned if not p.is_gone and _is_like(p, demand)][:num_replicas]
        self._put_back([place for place in planned if place not in fits])
        try:
            return fits + self._place_all(demand, num_replicas - len(fits))
        except ConfigError:
            self._put_back(fits)
            raise

    def give_back(self, place: Place, *, is_unused: bool = False) -> None:
        """Frees what a replica held; a second time does nothing. GPUs that were used are suspect: they go
        behind those that are free."""
        if not place.is_held:
            return
        place.is_held = False
        for host, gpus in zip(place.hosts, place.gpus_by_host, strict=True):
            host.free = [*gpus, *host.free] if is_unused else [*host.free, *gpus]
            host.num_procs -= place.procs

    def _put_back(self, places: Sequence[Place]) -> None:
        for place in reversed(places):
            self.give_back(place, is_unused=True)

    def _drop_plan(self) -> None:
        self._put_back([place for places in self._plan.values() for place in places])
        self._plan.clear()

    def _place_all(self, demand: Demand, num_replicas: int) -> list[Place]:
        places: list[Place] = []
        for index in range(num_replicas):
            place = self._place(demand)
            if place is None:
                error = _no_room(demand, index, num_replicas, self.alive)
                self._put_back(places)
                raise error
            places.append(place)
        return places

    def _place(self, demand: Demand) -> Place | None:
        """GPUs: the fullest host that has room, which leaves large gaps; none: the least busy host."""
        wanted = demand.gpus_per_host
        hosts = [host for host in self.alive if len(host.free) >= wanted]
        hosts.sort(key=lambda host: (len(host.free) if wanted else 0, host.num_procs / host.num_cores))
        if len(hosts) < demand.num_hosts:
            return None
        place = Place(hosts[: demand.num_hosts], [], demand.procs)
        for host in place.hosts:
            taken, host.free = host.free[:wanted], host.free[wanted:]
            host.num_procs += demand.procs
            place.gpus_by_host.append(taken)
        return place


def _is_like(place: Place, demand: Demand) -> bool:
    return (len(place.hosts), place.procs, len(place.gpus)) == (
        demand.num_hosts,
        demand.procs,
        demand.gpus_per_host * demand.num_hosts,
    )


def _check_sum(demands: Sequence[Demand], hosts: list[Host]) -> None:
    wanted, free = sum(d.num_gpus for d in demands), sum(len(host.free) for host in hosts)
    if wanted > free:
        parts = [f"{d.name} {d.num_gpus}" for d in demands if d.num_gpus]
        who = f"{' + '.join(parts)} = {wanted} GPUs are wanted"
        if len(parts) == 1:
            who = f"{parts[0].rpartition(' ')[0]} wants {wanted} GPUs"
        raise NotEnoughGPUs(
            f"{who}, {_free(hosts)}: lower procs or num_replicas of a service, or set its with_gpus to false"
        )


def _no_room(demand: Demand, index: int, num_replicas: int, hosts: list[Host]) -> ConfigError:
    name = demand.name
    if not hosts:
        return ConfigError(f"{name} wants a host, and none is left: all were lost, the log says when")
    if demand.num_hosts > len(hosts):
        return ConfigError(
            f"{name} wants {demand.num_hosts} hosts for one replica, and there are {len(hosts)}: lower "
            f"services.{name}.hosts, or set launcher.num_hosts"
        )
    where = f" on each of {demand.num_hosts} hosts" if demand.num_hosts > 1 else " on one host"
    which = f" for replica {index + 1} of {num_replicas}" if num_replicas > 1 else ""
    return NotEnoughGPUs(
        f"{name} wants {demand.gpus_per_host} GPUs{where if len(hosts) > 1 else ''}{which}, {_free(hosts)}: "
        f"lower services.{name}.procs or num_replicas, or set services.{name}.with_gpus: false"
    )


def _free(hosts: list[Host]) -> str:
    if len(hosts) == 1:
        return f"{len(hosts[0].free)} of {len(hosts[0].gpus)} are free"
    free = " + ".join(str(len(host.free)) for host in hosts)
    return f"the hosts have {' + '.join(str(len(host.gpus)) for host in hosts)}, of which {free} are free"
