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
    shares_gpus_with: str | None = None  # the service on whose GPUs it runs; None: on its own

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
            options.shares_gpus_with if options.with_gpus else None,
        )

    @property
    def gpus_per_host(self) -> int:
        """GPUs that a replica takes on each of its hosts."""
        return self.procs if self.with_gpus else 0

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.gpus_per_host * self.num_hosts * self.num_replicas

    @property
    def num_own_gpus(self) -> int:
        """Those of them that nobody else has."""
        return self.num_gpus if self.shares_gpus_with is None else 0


@dataclass(slots=True, eq=False)
class Place:
    """Where one replica runs, and what it holds there until it is given back."""

    hosts: list[Host]
    gpus_by_host: list[list[str]]
    procs: int  # on each host
    shares_with: str | None = None  # the service that holds its GPUs; None: it does so itself
    is_held: bool = True

    @property
    def gpus(self) -> list[str]:
        """Of all its processes, in rank order; empty without GPUs."""
        return [gpu for gpus in self.gpus_by_host for gpu in gpus]

    @property
    def is_gone(self) -> bool:
        """Whether a host under it is."""
        return any(host.is_gone for host in self.hosts)

    def gpus_on(self, host: Host) -> list[str]:
        """Of its processes on this host."""
        pairs = zip(self.hosts, self.gpus_by_host, strict=True)
        return [gpu for own, gpus in pairs if own is host for gpu in gpus]

    def num_threads(self, *, compute_bound: bool) -> int:
        """OpenMP threads of each process: its share of the cores where it keeps them busy."""
        return max(1, min(h.num_cores for h in self.hosts) // self.procs) if compute_bound else 1


class Ledger:
    """Who holds what on which host."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = list(hosts)
        self._plan: dict[str, list[Place]] = {}
        self._places: dict[str, list[Place]] = {}  # of each service, planned or in use

    @property
    def alive(self) -> list[Host]:
        """The hosts that are not gone."""
        return [host for host in self.hosts if not host.is_gone]

    def plan(self, demands: Sequence[Demand]) -> dict[str, list[Place]]:
        """Finds a place for every replica of a run, the largest first, and keeps it for when it starts.

        Those that share GPUs come last; replicas of one service never have a GPU in common. Raises
        NotEnoughGPUs with the arithmetic where one finds none, and then keeps nothing.
        """
        self._drop_plan()
        _check_sum(demands, self.alive)
        try:
            for demand in sorted(demands, key=lambda d: (d.shares_gpus_with is not None, -d.gpus_per_host)):
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
            host.num_procs -= place.procs
            if place.shares_with is None:
                host.free = [*gpus, *host.free] if is_unused else [*host.free, *gpus]

    def is_shared(self, place: Place) -> bool:
        """Whether its GPUs are another service's, or others run on them, too."""
        others = (p for places in self._places.values() for p in places if p.is_held and p is not place)
        return place.shares_with is not None or any(
            set(place.gpus_on(host)) & set(other.gpus_on(host)) for other in others for host in place.hosts
        )

    def is_to_move(self, name: str) -> bool:
        """Whether a replica of this service still holds a place on a host that is gone."""
        return any(place.is_held and place.is_gone for place in self._places.get(name, []))

    def _put_back(self, places: Sequence[Place]) -> None:
        for place in reversed(places):
            self.give_back(place, is_unused=True)

    def _drop_plan(self) -> None:
        self._put_back([place for places in self._plan.values() for place in places])
        self._plan.clear()

    def _place_all(self, demand: Demand, num_replicas: int) -> list[Place]:
        places: list[Place] = []
        for index in range(num_replicas):
            place = self._place(demand) if demand.shares_gpus_with is None else self._place_shared(demand)
            if place is None:
                error = self._no_room(demand, index, num_replicas)
                self._put_back(places)
                raise error
            places.append(place)
            held = [each for each in self._places.get(demand.name, []) if each.is_held]
            self._places[demand.name] = [*held, place]
        return places

    def _held(self, name: str | None) -> list[Place]:
        """The places of a service on hosts that are there."""
        return [p for p in self._places.get(name or "", []) if p.is_held and not p.is_gone]

    def _shared_gpus(self, demand: Demand, host: Host) -> list[str]:
        """GPUs on a host of the service that shares its own, without those that a replica of this one has."""
        used = {gpu for place in self._held(demand.name) for gpu in place.gpus_on(host)}
        base = [gpu for place in self._held(demand.shares_gpus_with) for gpu in place.gpus_on(host)]
        return [gpu for gpu in base if gpu not in used]

    def _place_shared(self, demand: Demand) -> Place | None:
        """The hosts with the most GPUs of the other service that are left for this one."""
        left = {host.name: self._shared_gpus(demand, host) for host in self.alive}
        hosts = sorted(self.alive, key=lambda host: -len(left[host.name]))[: demand.num_hosts]
        gpus = [left[host.name][: demand.gpus_per_host] for host in hosts]
        if len(hosts) < demand.num_hosts or any(len(each) < demand.gpus_per_host for each in gpus):
            return None
        for host in hosts:
            host.num_procs += demand.procs
        return Place(hosts, gpus, demand.procs, demand.shares_gpus_with)

    def _no_room(self, demand: Demand, index: int, num_replicas: int) -> ConfigError:
        if demand.shares_gpus_with is None or demand.num_hosts > len(self.alive):
            return _no_room(demand, index, num_replicas, self.alive)
        base = sum(len(place.gpus) for place in self._held(demand.shares_gpus_with))
        replicas = f"{num_replicas} replicas x {demand.num_gpus // demand.num_replicas} GPUs"
        return ConfigError(
            f"{demand.name} shares the GPUs of {demand.shares_gpus_with}, which has {base}, and wants "
            f"{replicas} of them: there is room for {index}, with each replica's GPUs on one host. Lower "
            f"services.{demand.name}.num_replicas or procs, or raise services.{demand.shares_gpus_with}.procs"
        )

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
    wanted, free = sum(d.num_own_gpus for d in demands), sum(len(host.free) for host in hosts)
    if wanted > free:
        parts = [f"{d.name} {d.num_own_gpus}" for d in demands if d.num_own_gpus]
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
