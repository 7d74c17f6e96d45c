"""ProcessReport: what one process says of the calls that it waits for and serves, and where its code is."""

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str  # qualified, without the functions that it was defined in


Stack = tuple[Frame, ...]
"""Outermost frame first."""


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A call that the process waits for; see `forge.controller.call.Outgoing`."""

    id: str
    parent: str | None
    task: str
    service: str
    method: str
    since: float
    replica: int | None = None
    pid: int | None = None
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class ServedCall:
    """An endpoint that runs in the process; see `forge.controller.call.Incoming`."""

    id: str
    caller: str
    method: str
    since: float
    is_executing: bool = False  # on the event loop's thread this very moment, so it awaits nothing
    stack: Stack = ()


@dataclass(frozen=True, slots=True)
class TaskStack:
    """A task of the event loop that serves no call."""

    name: str
    stack: Stack


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """A thread."""

    name: str
    runs_loop: bool
    stack: Stack


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """One process at one moment. One that could not answer has a `problem`, and nothing but its pid."""

    pid: int
    actor: str = ""
    at: float = 0.0  # time.time()
    num_moves: int = 0
    idle_s: float = 0.0  # since num_moves last grew
    loop_blocked: bool = False
    outgoing: tuple[WaitingCall, ...] = ()
    served: tuple[ServedCall, ...] = ()
    tasks: tuple[TaskStack, ...] = ()
    threads: tuple[ThreadStack, ...] = ()
    problem: str | None = None
    is_gone: bool = False
    dump: str = ""  # what py-spy says of a process that does not answer


def to_json(report: ProcessReport) -> str:
    """One line."""
    return json.dumps(dataclasses.asdict(report))


def from_json(document: str) -> ProcessReport:
    """The inverse of `to_json`; ValueError when it is cut off."""
    values = json.loads(document)
    return ProcessReport(
        **{
            **values,
            "outgoing": tuple(WaitingCall(**call) for call in values["outgoing"]),
            "served": tuple(ServedCall(**{**call, "stack": _stack(call)}) for call in values["served"]),
            "tasks": tuple(TaskStack(task["name"], _stack(task)) for task in values["tasks"]),
            "threads": tuple(
                ThreadStack(thread["name"], thread["runs_loop"], _stack(thread))
                for thread in values["threads"]
            ),
        }
    )


def _stack(values: dict[str, list[dict[str, str]]]) -> Stack:
    return tuple(Frame(frame["file"], int(frame["line"]), frame["function"]) for frame in values["stack"])
