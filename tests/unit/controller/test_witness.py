"""A process tells where it is, whatever its event loop does; so does one that can't answer, from outside."""

import asyncio
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forge.controller.call import Incoming, Outgoing, ledger
from forge.controller.process_report import ProcessReport
from forge.controller.why import STACKS, ask, collect, dump
from forge.controller.witness import start_witness
from forge.errors import ForgeError


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that turns on a thread of its own, as an actor's does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="loop")
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    ledger.incoming.clear()
    ledger.outgoing.clear()
    ledger.actor = "root"


def serve(
    loop: asyncio.AbstractEventLoop,
    endpoint: Callable[[], Awaitable[Any]],
    started: threading.Event | None = None,
) -> None:
    """Runs an endpoint as an actor does, and returns once it is under way."""
    noted = threading.Event()

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        ledger.incoming["x"] = Incoming("x", "root/learn", "work", time.time(), task)
        noted.set()
        await endpoint()

    asyncio.run_coroutine_threadsafe(run(), loop)
    assert noted.wait(5)
    assert started is None or started.wait(5)
    time.sleep(0.05)


def stop_serving(loop: asyncio.AbstractEventLoop) -> None:
    loop.call_soon_threadsafe(ledger.incoming["x"].task.cancel)
    time.sleep(0.05)


def asked(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> ProcessReport:
    witness = start_witness(tmp_path, loop)
    try:
        [report] = collect(tmp_path)
    finally:
        witness.close()
    assert report.problem is None
    return report


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def names(report: ProcessReport) -> list[str]:
    return [frame.function for frame in report.served[0].stack]


async def take_a_lock(lock: asyncio.Lock) -> None:
    await lock.acquire()  # the second one waits here


async def lock_twice() -> None:
    lock = asyncio.Lock()
    await take_a_lock(lock)
    await take_a_lock(lock)


def test_an_endpoint_that_awaits_is_shown_down_to_the_line(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    serve(loop, lock_twice)
    report = asked(tmp_path, loop)
    stop_serving(loop)
    assert (report.pid, report.loop_blocked) == (os.getpid(), False)
    [call] = report.served
    assert (call.id, call.caller, call.method, call.is_executing) == ("x", "root/learn", "work", False)
    at = {frame.function: frame for frame in call.stack}
    assert at["take_a_lock"].line == line_of(take_a_lock, "waits here")
    assert at["take_a_lock"].file == __file__
    assert names(report)[-3:] == ["lock_twice", "take_a_lock", "Lock.acquire"]


async def gathered() -> None:
    async def numbers():
        await asyncio.Event().wait()
        yield 1

    async def inner() -> None:
        async for _ in numbers():
            pass

    await asyncio.gather(asyncio.sleep(0), asyncio.wait_for(asyncio.create_task(inner()), 60))


def test_the_chain_goes_through_gather_wait_for_tasks_and_generators(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    serve(loop, gathered)
    report = asked(tmp_path, loop)
    stop_serving(loop)
    assert [n for n in names(report) if n in ("gathered", "wait_for", "inner", "numbers", "Event.wait")] == [
        "gathered",
        "wait_for",
        "inner",
        "numbers",
        "Event.wait",
    ]


def test_the_chain_goes_on_in_the_thread_that_works_for_it(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    started, release = threading.Event(), threading.Event()

    def compute(free: threading.Event) -> None:
        started.set()
        free.wait(20)

    async def endpoint() -> None:
        with ThreadPoolExecutor(2) as pool:
            other = asyncio.get_running_loop().run_in_executor(pool, release.wait)
            await asyncio.get_running_loop().run_in_executor(pool, compute, release)
            await other

    serve(loop, endpoint, started)
    report = asked(tmp_path, loop)
    release.set()
    time.sleep(0.1)
    assert names(report)[-3:] == ["compute", "Event.wait", "Condition.wait"]


def block(free: threading.Event, started: threading.Event) -> None:
    started.set()
    free.wait(20)


def test_it_answers_while_the_event_loop_is_blocked(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    started, release = threading.Event(), threading.Event()

    async def endpoint() -> None:
        block(release, started)

    witness = start_witness(tmp_path, loop)
    ask(tmp_path / f"{os.getpid()}.sock", STACKS)  # the loop's thread is known from now on
    serve(loop, endpoint, started)
    [report] = collect(tmp_path)
    release.set()
    witness.close()
    assert report.loop_blocked and report.served[0].is_executing
    at = {frame.function: frame for frame in report.served[0].stack}
    assert at["block"].line == line_of(block, "free.wait")
    [thread] = [thread for thread in report.threads if thread.runs_loop]
    assert thread.name == "loop" and "block" in [frame.function for frame in thread.stack]


def test_calls_and_tasks_of_the_process_are_told(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    async def roll() -> None:
        await asyncio.sleep(60)

    async def start() -> asyncio.Task[None]:
        return asyncio.create_task(roll(), name="rollout 3")

    task = asyncio.run_coroutine_threadsafe(start(), loop).result(5)
    ledger.outgoing["a"] = Outgoing("a", None, "learn", "trainer", "train_step", 5.0, 1, 77, 2)
    report = asked(tmp_path, loop)
    loop.call_soon_threadsafe(task.cancel)
    time.sleep(0.05)
    [call] = report.outgoing
    assert (call.service, call.method, call.replica, call.pid, call.attempt) == (
        "trainer",
        "train_step",
        1,
        77,
        2,
    )
    [told] = [task for task in report.tasks if task.name == "rollout 3"]
    assert told.stack[0].function == "roll"


def test_a_client_that_says_nothing_does_not_silence_it(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    witness = start_witness(tmp_path, loop)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.connect(str(tmp_path / f"{os.getpid()}.sock"))
        report = ask(tmp_path / f"{os.getpid()}.sock", STACKS, timeout_s=5)
    witness.close()
    assert report.problem is None


def test_closing_removes_the_socket(tmp_path: Path) -> None:
    start_witness(tmp_path / "run", None).close()
    assert collect(tmp_path / "run") == []
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_a_path_that_is_too_long_is_an_error_with_the_length(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"at most 107 bytes, .* has \d+"):
        start_witness(tmp_path / ("x" * 100), None)


CHILD = """
import sys, time
from pathlib import Path
from forge.controller.witness import start_witness
start_witness(Path(sys.argv[1]), None)
def nap_for_long():
    print("ready", flush=True)
    time.sleep(60)
nap_for_long()
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_stopped_process_is_seen_from_outside(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    while "(stopped)" not in Path(f"/proc/{child.pid}/status").read_text():
        time.sleep(0.01)
    [report] = collect(tmp_path)
    assert report.problem is not None and "does not answer (it is stopped" in report.problem
    assert "nap_for_long" in report.dump or "Permission" in report.dump, report.dump


def test_a_killed_process_is_reported_as_gone(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    [report] = collect(tmp_path)
    assert report.is_gone and report.problem == f"process {child.pid} is gone"


def test_a_process_that_can_not_be_read_says_why() -> None:
    assert dump(2**22 + 1).startswith("py-spy can't read its stack: ")
