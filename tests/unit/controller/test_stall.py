"""A run in which nothing moves is noticed, told and ended; SIGUSR1 tells at any time."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge.controller.call import Outgoing, ledger
from forge.controller.stall import EXIT_CODE, StallWatch, install_sigusr1
from forge.controller.witness import start_witness

TIMEOUT_S = 0.5


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run of one process, this one."""
    witness = start_witness(tmp_path, None)
    yield tmp_path
    witness.close()
    ledger.outgoing.clear()


def call_the_trainer() -> None:
    ledger.outgoing["a"] = Outgoing("a", None, "learn", "trainer", "train_step", time.time())


def test_a_run_in_which_nothing_moves_is_told_once(run_dir: Path) -> None:
    call_the_trainer()
    told: queue.Queue[str] = queue.Queue()
    watch = StallWatch(run_dir, TIMEOUT_S, told.put)
    text = told.get(timeout=20)
    time.sleep(3 * TIMEOUT_S)
    watch.close()
    assert told.empty()
    assert text.startswith("root/learn  waits ")
    assert text.endswith("what is waited for: trainer.train_step")


def test_a_run_that_moves_or_waits_for_nothing_is_left_alone(run_dir: Path) -> None:
    told: queue.Queue[str] = queue.Queue()
    watch = StallWatch(run_dir, TIMEOUT_S, told.put)
    time.sleep(2 * TIMEOUT_S)  # nobody waits
    call_the_trainer()
    for _ in range(20):
        time.sleep(TIMEOUT_S / 10)
        ledger.moved()
    watch.close()
    assert told.empty()


def test_a_watch_without_a_timeout_does_nothing(run_dir: Path) -> None:
    before = threading.active_count()
    watch = StallWatch(run_dir, None, print)
    assert threading.active_count() == before
    watch.close()


def test_sigusr1_prints_the_graph_and_is_given_back(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    call_the_trainer()
    previous = signal.getsignal(signal.SIGUSR1)
    handler = install_sigusr1(run_dir)
    assert handler is not None
    os.kill(os.getpid(), signal.SIGUSR1)
    handler.close()  # what was asked before is answered first
    assert "root/learn  waits " in capfd.readouterr().err
    assert signal.getsignal(signal.SIGUSR1) == previous


def test_sigusr1_is_left_alone_off_the_main_thread(run_dir: Path) -> None:
    handlers: list[object] = []
    thread = threading.Thread(target=lambda: handlers.append(install_sigusr1(run_dir)))
    thread.start()
    thread.join()
    assert handlers == [None]


RUN = """
import asyncio, os, signal, sys, threading, time
from pathlib import Path
from forge.controller.call import Outgoing, ledger
from forge.controller.stall import EXIT_CODE, Ending, StallWatch, install_sigusr1
from forge.controller.witness import start_witness

async def learn():
    ledger.outgoing["a"] = Outgoing("a", None, "learn", "trainer", "train_step", time.time())
    if sys.argv[2] == "blocked":
        time.sleep(60)
    if sys.argv[2] == "signals":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
        os.kill(os.getpid(), signal.SIGUSR1)
        threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGTERM]).start()
    await asyncio.sleep(60)

async def main():
    run_dir = Path(sys.argv[1])
    start_witness(run_dir, asyncio.get_running_loop())
    usr1 = install_sigusr1(run_dir)
    ending = Ending(asyncio.current_task(), grace_s=1.0)
    watch = StallWatch(run_dir, None if sys.argv[2] == "signals" else 1.0, ending)
    try:
        await learn()
    except asyncio.CancelledError:
        print("closed in order", flush=True)
        watch.close()
        usr1.close()
        return EXIT_CODE if ending.has_stalled else 130

sys.exit(asyncio.run(main()))
"""


def run(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, str(folder), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_stalled_run_is_closed_in_order(tmp_path: Path) -> None:
    done = run(tmp_path, "awaits")
    assert (done.returncode, done.stdout) == (EXIT_CODE, "closed in order\n"), done.stderr
    assert "the run has stalled:\nroot/learn  waits " in done.stderr


def test_a_run_whose_event_loop_is_blocked_is_ended_too(tmp_path: Path) -> None:
    done = run(tmp_path, "blocked")
    assert (done.returncode, done.stdout) == (EXIT_CODE, ""), done.stderr
    assert re.search(
        r"the event loop of root \(pid \d+\) is blocked:\n(   .*\n)*   <string>:\d+ learn\n", done.stderr
    )
    assert "the stalled run did not end within 1 s: killed" in done.stderr


def test_sigusr1_and_asyncios_own_signals_live_side_by_side(tmp_path: Path) -> None:
    done = run(tmp_path, "signals")
    assert (done.returncode, done.stdout) == (130, "closed in order\n"), done.stderr
    assert "root/learn  waits " in done.stderr
