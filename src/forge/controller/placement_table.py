"""The text of a plan: where each replica will run and what it takes, before anything is started."""

import itertools
from collections.abc import Sequence

from forge.controller.launcher import Launcher
from forge.controller.ledger import Demand, Host, Ledger, Place
from forge.errors import NotEnoughGPUs

_HEADER = ("service", "replica", "host", "GPUs", "processes", "OpenMP threads of each")


def placement_table(launcher: Launcher, demands: Sequence[Demand], num_set_aside: int = 0) -> str:
    """A table of all replicas and their sums against what the hosts have, by the arithmetic of a real start.

    num_set_aside: the last hosts, which run no actors.

    GPUs that are missing are imagined, so that the plan for another machine can be read on this one.
    """
    hosts = launcher.plan()
    ledger, num_missing = Ledger(hosts[: len(hosts) - num_set_aside]), 0
    have = [len(host.gpus) for host in ledger.hosts]
    while True:
        try:
            plan = ledger.plan(demands)
            break
        except NotEnoughGPUs:
            _imagine_gpu(min(ledger.hosts, key=lambda host: len(host.gpus)))
            num_missing += 1
    rows = [_row(demand, i, place) for demand in demands for i, place in enumerate(plan[demand.name])]
    return "\n".join([*_aligned([_HEADER, *rows]), _sums(demands, ledger, have, num_missing)])


def _imagine_gpu(host: Host) -> None:
    id = next(id for id in map(str, itertools.count()) if id not in host.gpus)
    host.gpus.append(id)
    host.free.append(id)


def _row(demand: Demand, index: int, place: Place) -> tuple[str, ...]:
    procs = str(place.procs) if len(place.hosts) == 1 else f"{len(place.hosts)} x {place.procs}"
    return (
        demand.name,
        str(index),
        " + ".join(host.name for host in place.hosts),
        _gpus(place),
        procs,
        str(place.num_threads(compute_bound=demand.compute_bound)),
    )


def _gpus(place: Place) -> str:
    ids = " + ".join(",".join(gpus) for gpus in place.gpus_by_host if gpus) or "none"
    return ids if place.shares_with is None else f"{ids} of {place.shares_with}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _sums(demands: Sequence[Demand], ledger: Ledger, have: list[int], num_missing: int) -> str:
    num_gpus = sum(demand.num_own_gpus for demand in demands)
    num_procs = sum(host.num_procs for host in ledger.hosts)
    has = " + ".join(map(str, have))
    cores = " + ".join(str(host.num_cores) for host in ledger.hosts)
    missing = f": {num_missing} missing here" if num_missing else ""
    hosts = "this machine has" if len(have) == 1 else f"{len(have)} hosts have"
    return f"{_count(num_gpus, 'GPU')}, {num_procs} processes; {hosts} {has} GPUs, {cores} cores{missing}"


def _count(num: int, noun: str) -> str:
    return f"{num or 'no'} {noun}{'' if num == 1 else 's'}"
