"""Why: asks every process of a run what it waits for, and tells who waits for whom."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forge.controller.process_report import ProcessReport, from_json
from forge.controller.provisioner import is_running
from forge.controller.wait_graph import join
from forge.controller.wait_text import render
from forge.controller.witness import MOVES, STACKS

ANSWER_S = 1.0
DUMP_S = 15.0  # py-spy may have to read the symbols of a large library first


def explain(run_dir: Path, idle_s: float | None = None) -> str:
    """The wait-for graph of a run as text. `idle_s`: since when nothing moved, if the caller knows better."""
    return render(join(collect(run_dir)), idle_s)


def collect(run_dir: Path) -> list[ProcessReport]:
    """Every process of the run, by pid, with all stacks. Takes longest for those that do not answer."""

    def ask_or_dump(path: Path) -> ProcessReport:
        return with_dump(ask(path, STACKS))

    return _in_parallel(ask_or_dump, run_dir)


def collect_moves(run_dir: Path) -> list[ProcessReport]:
    """Every process of the run without stacks: cheap."""
    return _in_parallel(lambda path: ask(path, MOVES), run_dir)


def ask(path: Path, request: str, timeout_s: float = ANSWER_S) -> ProcessReport:
    """What one witness answers, or a report of what is wrong with it."""
    pid = int(path.stem)
    if not is_running(pid):
        return ProcessReport(pid, problem=f"process {pid} is gone", is_gone=True)
    chunks: list[bytes] = []
    end = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(f"{request}\n".encode())
            while chunk := connection.recv(1 << 16):
                chunks.append(chunk)
                connection.settimeout(max(0.01, end - time.monotonic()))
        return from_json(b"".join(chunks).decode())
    except (ConnectionRefusedError, FileNotFoundError):
        return ProcessReport(pid, problem=f"process {pid} has stopped answering: it ends", is_gone=True)
    except (OSError, ValueError):
        state = " (it is stopped: kill -CONT)" if _is_stopped(pid) else ""
        return ProcessReport(pid, problem=f"process {pid} does not answer{state}")


def can_be_asked(path: Path) -> bool:
    """Whether a process listens there: also one that is too stuck to answer."""
    if not is_running(int(path.stem)):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # so many have asked already that no more can wait for an answer
            return True
    return True


def with_dump(report: ProcessReport) -> ProcessReport:
    """Adds what py-spy says of a process that does not answer."""
    if report.problem is None or report.is_gone:
        return report
    return ProcessReport(report.pid, problem=report.problem, dump=dump(report.pid))


def dump(pid: int) -> str:
    """The Python stacks of a process as py-spy sees them from outside, or why it can't."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "py-spy is not installed: its stack can't be read"
    problem = ""
    for how in ([], ["--nonblocking"]):  # a process that is stopped can't be paused, only read
        try:
            done = subprocess.run(
                [program, "dump", *how, "--pid", str(pid)], capture_output=True, text=True, timeout=DUMP_S
            )
        except subprocess.TimeoutExpired:
            problem = f"it took longer than {DUMP_S:g} s"
            continue
        if done.returncode == 0:
            return done.stdout.strip()
        problem = "; ".join(done.stderr.strip().splitlines()[:4])
    return f"py-spy can't read its stack: {problem}"


def _in_parallel(function: Callable[[Path], ProcessReport], run_dir: Path) -> list[ProcessReport]:
    paths = sorted((path for path in run_dir.glob("*.sock") if path.stem.isdecimal()), key=_pid)
    if not paths:
        return []
    with ThreadPoolExecutor(min(32, len(paths)), thread_name_prefix="forge-why") as pool:
        return list(pool.map(function, paths))


def _pid(path: Path) -> int:
    return int(path.stem)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
