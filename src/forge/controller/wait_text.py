"""The wait-for graph as text: the longest waits first, alike ones on one line."""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from forge.controller.frames import is_busy, told, useful
from forge.controller.process_report import ProcessReport, Stack
from forge.controller.wait_graph import Place, Run, Wait, WaitGraph, replica_of

T = TypeVar("T")
MAX_TARGETS = 5  # in the summary
MAX_DUMP_LINES = 80


def render(graph: WaitGraph, idle_s: float | None = None) -> str:
    """All of it. `idle_s`: since when nothing has moved; by default what the processes say."""
    reports = [report for report in graph.reports if report.problem is None]
    lines = [*_waits(graph.waits, "")]
    for run in graph.orphans:
        lines += [f"nobody who answers waits for this, it was called by {run.caller}:", *_runs([run], "  ")]
    lines += graph.circles
    for report in graph.reports:
        lines += _beside(report, graph)
    if idle_s is None and reports:
        idle_s = min(report.idle_s for report in reports)
    return "\n".join([*lines, _summary(graph, idle_s)])


def _waits(waits: Iterable[Wait], indent: str) -> Iterator[str]:
    groups = _grouped(waits, _wait_key)
    groups.sort(key=lambda group: -max(wait.waited_s for wait in group))
    subjects = [_subject(group) for group in groups]
    width = max((len(subject) for subject in subjects if len(subject) <= 40), default=0)
    for subject, group in zip(subjects, groups, strict=True):
        waited = _seconds([wait.waited_s for wait in group])
        target = f"{'wait' if len(group) > 1 else 'waits'} {waited} for {group[0].target}"
        yield f"{indent}{subject:<{width}}  {target}{_where(group[0])}"
        yield from _runs([run for wait in group for run in wait.runs], f"{indent}  ")


def _where(wait: Wait) -> str:
    """What is to be said of the place of a call, behind its target."""
    process = "" if wait.pid is None else f"   (pid {wait.pid})"
    again = f", attempt {wait.attempt}" if wait.attempt > 1 else ""
    match wait.place:
        case Place.QUEUE:
            replicas = "replica" if wait.num_replicas == 1 else "replicas"
            found = f"{wait.num_replicas} {replicas}, {wait.num_idle} idle"
            return f", in the queue ({found if wait.num_replicas else 'no replica reports'}){again}"
        case Place.SENT:
            why = ": its event loop is blocked, see below" if wait.loop_blocked else ""
            return f", which has not begun{why}{again}{process}"
        case Place.SILENT:
            return f", which does not answer, see below{again}{process}"
        case Place.GONE:
            named = "its process" if wait.pid is None else f"process {wait.pid}"
            return f": {named} is gone, or on another machine{again}"
        case Place.SERVED:
            return again + process


def _runs(runs: Iterable[Run], indent: str) -> Iterator[str]:
    """Endpoints that run: what they wait for, else their stack."""
    runs = list(runs)
    yield from _waits((wait for run in runs for wait in run.below), indent)
    for group in _grouped((run for run in runs if not run.below), _run_key):
        run = group[0]
        ran = _seconds([other.runs_s for other in group])
        num_calls = len(group) // len({other.pid for other in group})
        name = f"{replica_of(run.actor)}.{run.method}{_ranks(group)}"
        subject = name if num_calls == 1 else f"{num_calls} times {name}"
        if run.awaits_turn:
            yield f"{indent}{subject}  waits {ran} for its turn: the actor is busy with other calls"
            continue
        doing = "executes" if run.is_executing else "waits for no call"
        yield f"{indent}{subject}  runs {ran}; {doing}; stack of pid {run.pid}:"
        yield from _stack(run.stack, f"{indent}   ")


def _beside(report: ProcessReport, graph: WaitGraph) -> Iterator[str]:
    """What a process has to say beside its calls: why it does not answer, and threads and tasks at work."""
    if report.problem is not None:
        if not report.is_gone:
            yield f"{report.problem}; seen from outside:"
            yield from (f"  {line}" for line in report.dump.splitlines()[:MAX_DUMP_LINES])
        return
    shown = {frame for call in report.served for frame in call.stack[-1:]}
    if report.loop_blocked:
        stacks = [t.stack for t in report.threads if t.runs_loop and t.stack[-1] not in shown]
        where = ":" if stacks else ", see above"
        yield f"the event loop of {report.actor} (pid {report.pid}) is blocked{where}"
        yield from (line for stack in stacks for line in _stack(stack, "   "))
    if any(run.pid == report.pid for run in _leaf_runs(graph)):
        for thread in report.threads:
            if is_busy(thread.stack) and not thread.runs_loop and thread.stack[-1] not in shown:
                yield f"thread {thread.name} of {report.actor} (pid {report.pid}):"
                yield from _stack(thread.stack, "   ")
    if not report.served and report.outgoing:
        waiting = {call.task for call in report.outgoing}
        idle = [t for t in report.tasks if t.name not in waiting and is_busy(t.stack)]
        for group in _grouped(idle, lambda task: task.stack):
            names = _compressed([f"{report.actor}/{task.name}" for task in group])
            places = [told(frame) for frame in useful(group[0].stack)[-2:]]
            yield f"{names}  waits for no call, in {', '.join(places)}"


def _summary(graph: WaitGraph, idle_s: float | None) -> str:
    parts = [] if idle_s is None else [f"nothing has moved for {idle_s:.0f} s"]
    targets = list(dict.fromkeys(_targets(graph.waits))) or [wait.target for wait in graph.waits]
    more = f" and {len(targets) - MAX_TARGETS} more" if len(targets) > MAX_TARGETS else ""
    if targets:
        parts.append(f"what is waited for: {', '.join(targets[:MAX_TARGETS])}{more}")
    else:
        parts.append("no call is outstanding")
    return "; ".join(parts)


def _targets(waits: Sequence[Wait]) -> Iterator[str]:
    """The ends of all waits, the longest first; a queue is one only where no replica is at work."""
    for wait in sorted(waits, key=lambda wait: -wait.waited_s):
        below = [below for run in wait.runs for below in run.below]
        if below:
            yield from _targets(below)
        is_end = any(not run.below for run in wait.runs) if wait.runs else wait.num_idle == wait.num_replicas
        if is_end or wait.place in (Place.SENT, Place.SILENT, Place.GONE):
            yield wait.target


def _leaf_runs(graph: WaitGraph) -> Iterator[Run]:
    todo = [*graph.orphans, *(run for wait in graph.waits for run in wait.runs)]
    while todo:
        run = todo.pop()
        if not run.below:
            yield run
        todo += [below for wait in run.below for below in wait.runs]


def _stack(stack: Stack, indent: str) -> Iterator[str]:
    yield from (f"{indent}{told(frame)}" for frame in useful(stack))


def _grouped(things: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for thing in things:
        groups[key(thing)].append(thing)
    return list(groups.values())


def _wait_key(wait: Wait) -> Hashable:
    """Equal for waits that differ in their times, and in the numbers of who waits."""
    kind = re.sub(r"\d+$", "", wait.waiter) if "/" in wait.waiter else wait.waiter
    below = frozenset(_run_key(run) for run in wait.runs)
    return kind, wait.target, wait.place, wait.pid, wait.attempt, wait.loop_blocked, below


def _run_key(run: Run) -> Hashable:
    below = frozenset(_wait_key(wait) for wait in run.below)
    return replica_of(run.actor), run.method, run.is_executing, run.awaits_turn, useful(run.stack), below


def _subject(group: Sequence[Wait]) -> str:
    """ "8 tasks: root/rollout 0..7" """
    names = [wait.waiter for wait in group]
    if len(group) == 1:
        return names[0]
    kind = "tasks" if "/" in names[0] else "calls"
    return f"{len(group)} {kind}: {_compressed(list(dict.fromkeys(names)))}"


def _compressed(names: Sequence[str]) -> str:
    """Names that end in numbers, with the numbers as ranges."""
    if len(names) == 1:
        return names[0]
    by_stem: dict[str, list[int]] = defaultdict(list)
    for name in names:
        stem, number = re.fullmatch(r"(.*?)(\d*)", name, re.DOTALL).groups()  # pyright: ignore
        by_stem[stem] += [int(number)] if number else []
    return ", ".join(f"{stem}{_ranges(numbers)}" for stem, numbers in by_stem.items())


def _ranges(numbers: Sequence[int]) -> str:
    """ "0..7, 9" """
    ordered = sorted(set(numbers))
    starts = [n for n in ordered if n - 1 not in ordered]
    ends = [n for n in ordered if n + 1 not in ordered]
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in zip(starts, ends, strict=True))


def _ranks(group: Sequence[Run]) -> str:
    ranks = {run.actor.rpartition("].")[2] for run in group if "]." in run.actor}
    some = "rank" if len(ranks) == 1 else "ranks"
    return f" on {some} {_ranges([int(rank) for rank in ranks])}" if ranks else ""


def _seconds(values: Sequence[float]) -> str:
    least, most = max(0.0, min(values)), max(0.0, *values, 0.0)
    return f"{most:.1f} s" if most - least < 1 else f"{least:.1f} to {most:.1f} s"
