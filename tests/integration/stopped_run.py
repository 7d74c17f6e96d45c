"""A run of an app that is asked to stop, as a terminal or a cluster does: how soon it ends, what is left."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from forge.controller.provisioner import is_running

ROOT = Path(__file__).parents[2]
LIMIT_S = 10.0


def stop_after(
    line_start: str, arguments: Sequence[str], log: Path, how: signal.Signals, *, num_processes: int
) -> list[str]:
    """The signal to the whole group once such a line was printed; what was printed in all.

    The run must end with exit code 130 within LIMIT_S, and leave none of its processes, which are so many at
    least.
    """
    with subprocess.Popen(
        arguments,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background
    ) as process:
        assert process.stdout is not None
        try:
            printed = []
            for line in process.stdout:
                printed.append(line)
                if line.startswith(line_start):
                    break
            children = descendants(process.pid)
            started = time.monotonic()
            os.killpg(process.pid, how)
            printed += process.stdout
            code = process.wait(60)
            seconds = time.monotonic() - started
            left = [pid for pid in children if is_running(pid)]
        finally:
            with contextlib.suppress(ProcessLookupError):  # none is left
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 130, log.read_text()[-3000:]
    assert len(children) >= num_processes and not left
    assert seconds < LIMIT_S
    return printed


def descendants(pid: int) -> set[int]:
    """Its children, and theirs."""
    found, queue = set(), [pid]
    while queue:
        try:
            for task in Path(f"/proc/{queue.pop()}/task").iterdir():
                children = [int(child) for child in (task / "children").read_text().split()]
                found |= set(children)
                queue += children
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
