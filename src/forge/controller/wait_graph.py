"""WaitGraph: the reports of all processes joined into who waits for whom, and who waits in a circle."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from forge.controller.frames import is_busy
from forge.controller.process_report import ProcessReport, ServedCall, Stack, WaitingCall


class Place(Enum):
    """Where a call is."""

    QUEUE = "in the queue"  # it has no replica yet
    SENT = "sent"  # to a process that has not begun with it
    SERVED = "served"
    SILENT = "silent"  # sent to a process that does not answer us
    GONE = "gone"  # sent to a process that does not report: it is gone, or on another machine


@dataclass(frozen=True, slots=True)
class Run:
    """An endpoint that runs in one process, and the calls it waits for."""

    actor: str
    pid: int
    method: str
    caller: str
    runs_s: float
    is_executing: bool
    awaits_turn: bool  # its actor takes so many calls at once, and this one has not begun
    stack: Stack
    below: tuple["Wait", ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """One call: who waits, since when, for what, and what that does."""

    waiter: str  # "root/learn", or "trainer[0].train_step"
    waited_s: float
    target: str  # "trainer[0].train_step"; without a number while it is in the queue
    place: Place
    pid: int | None
    attempt: int
    runs: tuple[Run, ...] = ()  # one for each process that serves it
    num_replicas: int = 0  # of the service, as far as their processes report
    num_idle: int = 0  # that serve no call
    loop_blocked: bool = False  # in the process it was sent to


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """Everything that a run waits for."""

    reports: tuple[ProcessReport, ...]
    waits: tuple[Wait, ...]  # those that no endpoint made; the others lie below them
    orphans: tuple[Run, ...]  # endpoints that run although nobody who reports waits for them
    circles: tuple[str, ...]  # one sentence each


def join(reports: Iterable[ProcessReport]) -> WaitGraph:
    """The graph of all reports of one moment."""
    return _Join(tuple(reports)).graph()


def replica_of(actor: str) -> str:
    """A process's name without its rank: "trainer[0]" for "trainer[0].3"."""
    return re.sub(r"(\])\.\d+$", r"\1", actor)


def service_of(actor: str) -> str:
    """A process's name without replica and rank."""
    return re.sub(r"\[\d+\](\.\d+)?$", "", actor)


class _Join:
    """The reports by what they are looked up for."""

    def __init__(self, reports: tuple[ProcessReport, ...]) -> None:
        self.reports = reports
        self.by_pid = {report.pid: report for report in reports}
        self.serving: dict[str, list[tuple[ProcessReport, ServedCall]]] = defaultdict(list)
        self.made_by: dict[str, list[tuple[ProcessReport, WaitingCall]]] = defaultdict(list)
        self.calls = {call.id: call for report in reports for call in report.outgoing}
        for report in reports:
            for served in report.served:
                self.serving[served.id].append((report, served))
            for call in report.outgoing:
                if call.parent is not None:
                    self.made_by[call.parent].append((report, call))

    def graph(self) -> WaitGraph:
        waits = [
            self.wait(report, call, f"{report.actor}/{call.task}", ())
            for report in self.reports
            for call in report.outgoing
            if call.parent not in self.serving
        ]
        orphans = [
            self.run(report, served, ())
            for id, runs in self.serving.items()
            for report, served in runs
            if id not in self.calls
        ]
        circles = dict.fromkeys([*self.deadlocks(), *_returns(waits)])
        return WaitGraph(self.reports, tuple(waits), tuple(orphans), tuple(circles))

    def wait(self, report: ProcessReport, call: WaitingCall, waiter: str, path: tuple[str, ...]) -> Wait:
        place = self.place(call)
        there = self.processes(call)
        replicas = {replica_of(r.actor) for r in self.reports if service_of(r.actor) == call.service}
        busy = {replica_of(r.actor) for r in self.reports if r.served}
        return Wait(
            waiter=waiter,
            waited_s=report.at - call.since,
            target=f"{call.service if place is Place.QUEUE else self.where(call)}.{call.method}",
            place=place,
            pid=call.pid or (there[0].pid if there else None),
            attempt=call.attempt,
            runs=tuple(self.run(*serving, (*path, call.id)) for serving in self.serving.get(call.id, ())),
            num_replicas=len(replicas),
            num_idle=len(replicas - busy),
            loop_blocked=any(r.loop_blocked for r in there),
        )

    def run(self, report: ProcessReport, served: ServedCall, path: tuple[str, ...]) -> Run:
        name = f"{replica_of(report.actor)}.{served.method}"
        # A process makes only its own calls: of those with this parent, the ones in its own report.
        below = [
            self.wait(maker, call, name, path)
            for maker, call in self.made_by.get(served.id, ())
            if maker.pid == report.pid and call.id not in path
        ]
        return Run(
            report.actor,
            report.pid,
            served.method,
            served.caller,
            report.at - served.since,
            served.is_executing,
            _awaits_turn(served),
            served.stack,
            tuple(below),
        )

    def place(self, call: WaitingCall) -> Place:
        there = self.processes(call)
        if call.id in self.serving:
            return Place.SERVED
        if call.replica is None and call.pid is None and not call.service.endswith("]"):
            return Place.QUEUE
        if any(report.problem and not report.is_gone for report in there):
            return Place.SILENT
        return Place.SENT if any(not report.problem for report in there) else Place.GONE

    def where(self, call: WaitingCall) -> str:
        """The replica's name."""
        if call.id in self.serving:
            return replica_of(self.serving[call.id][0][0].actor)
        return replica_of(call.service) if call.replica is None else f"{call.service}[{call.replica}]"

    def processes(self, call: WaitingCall) -> list[ProcessReport]:
        """Those that a call was sent to and that report something."""
        if call.id in self.serving:
            return [report for report, _ in self.serving[call.id]]
        if call.pid is not None:
            return [self.by_pid[call.pid]] if call.pid in self.by_pid else []
        return [
            report for report in self.reports if report.actor and replica_of(report.actor) == self.where(call)
        ]

    def deadlocks(self) -> list[str]:
        """Circles of calls none of which can go on before another one does.

        An endpoint waits for all of its calls. A call in the queue, or one that its replica has not begun
        with, waits for any of the calls that run there: it is stuck only if they all are.
        """
        stuck = set(self.calls) | set(self.serving)
        while lost := {id for id in stuck if not self._is_stuck(id, stuck)}:
            stuck -= lost
        found: dict[frozenset[str], str] = {}
        for start in sorted(stuck):
            path = [start]
            while (next_id := min(stuck.intersection(self._needs(path[-1])))) not in path:
                path.append(next_id)
            circle = path[path.index(next_id) :]
            names = [self._name(id) for id in circle]
            first = min(range(len(circle)), key=lambda i: (circle[i] not in self.serving, names[i]))
            names = [*names[first:], *names[:first], names[first]]
            found.setdefault(frozenset(names), f"deadlock: {' waits for '.join(names)}")
        return list(found.values())

    def _is_stuck(self, id: str, stuck: set[str]) -> bool:
        needs = self._needs(id)
        return bool(needs & stuck) if id in self.made_by else bool(needs) and needs <= stuck

    def _needs(self, id: str) -> set[str]:
        if id in self.made_by:
            return {call.id for _, call in self.made_by[id]}
        if id in self.serving:
            held_up = [report for report, served in self.serving[id] if _awaits_turn(served)]
            return {s.id for report in held_up for s in report.served if not _awaits_turn(s)}
        call = self.calls[id]
        place = self.place(call)
        if place is Place.QUEUE:
            servers: Sequence[ProcessReport] = [
                r for r in self.reports if service_of(r.actor) == call.service
            ]
        else:
            servers = self.processes(call) if place is Place.SENT else []
        return {served.id for report in servers for served in report.served}

    def _name(self, id: str) -> str:
        if id in self.serving:
            report, served = self.serving[id][0]
            return f"{replica_of(report.actor)}.{served.method}"
        call = self.calls[id]
        if self.place(call) is Place.QUEUE:
            return f"{call.service}.{call.method} (in the queue)"
        return f"{self.where(call)}.{call.method}"


def _awaits_turn(served: ServedCall) -> bool:
    """Whether it is still in forge's own code, which is before the actor's."""
    return bool(served.stack) and not served.is_executing and not is_busy(served.stack)


def _returns(waits: Sequence[Wait], path: tuple[Run, ...] = ()) -> list[str]:
    """Calls that came back to a replica that waits for them, and wait there: for what the first one holds?

    A replica that calls itself directly spreads its work over its ranks; that is none.
    """
    found = []
    for wait in waits:
        for run in wait.runs:
            runs = (*path, run)
            replica = replica_of(run.actor)
            back = [i for i, above in enumerate(path[:-1]) if replica_of(above.actor) == replica]
            if back and not run.below and not run.is_executing and not run.awaits_turn:
                names = [f"{replica_of(above.actor)}.{above.method}" for above in runs[back[-1] :]]
                found.append(f"perhaps a deadlock: {' waits for '.join(names)}, which waits inside {replica}")
            found += _returns(run.below, runs)
    return found
