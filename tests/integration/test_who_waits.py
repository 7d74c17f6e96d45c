"""A run that stalls says who waits for whom, and ends; a live run says so when it is asked."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import asyncio
from forge.controller import Runtime
from tests.integration.machines import Fragile, Visitor

async def main():
    async with Runtime(stall_timeout_s={timeout}):
        service = await Fragile.options(mesh_name="stuck").as_service({folder!r})
        visitor = await Visitor.options(mesh_name="visitor").as_actor(service)
        print("ready", flush=True)
        waits = asyncio.create_task(visitor.visit.call_one(2, 10_000), name="learn")
        blocks = asyncio.create_task(service.{call}, name="rollout 3")
        await asyncio.gather(waits, blocks)

asyncio.run(main())
"""


def start(tmp_path: Path, call: str, timeout: float | None) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(timeout=timeout, folder=str(tmp_path), call=call))
    return subprocess.Popen(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background
    )


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "ready\n":
        assert line, process.communicate()[1][-3000:]


def check_graph(text: str) -> None:
    """root/learn -> visitor[0].visit -> 2 x stuck[0].pid, each with where its code stands."""
    assert "root/learn" in text and "visitor[0].visit" in text and "stuck[0].pid" in text
    assert "machines.py" in text


def test_an_endpoint_that_never_returns_is_named_and_ends_the_run(tmp_path: Path) -> None:
    process = start(tmp_path, "linger.route('file', 10_000)", 4)
    started = time.monotonic()
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1 and time.monotonic() - started < 80
    check_graph(errors)
    assert "root/rollout 3" in errors and "stuck[0].linger" in errors
    assert "RunStalled: nothing had moved for 4 s" in errors


def test_a_blocked_event_loop_is_named_with_the_line_that_blocks_it(tmp_path: Path) -> None:
    process = start(tmp_path, "block_once.route(10_000)", 4)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "stuck[0].block_once" in errors and "block_once" in errors and "machines.py" in errors


def test_a_live_run_is_asked_by_a_command_and_by_a_signal(tmp_path: Path) -> None:
    process = start(tmp_path, "linger.route('file', 10_000)", None)
    try:
        wait_until_ready(process)
        time.sleep(2)
        asked = subprocess.run(
            [sys.executable, "-m", "forge.cli", "why", str(process.pid)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert asked.returncode == 0, asked.stderr
        check_graph(asked.stdout)
        process.send_signal(signal.SIGUSR1)
        time.sleep(2)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    check_graph(errors)
    nobody = subprocess.run(
        [sys.executable, "-m", "forge.cli", "why", str(process.pid)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert nobody.returncode == 1 and "Traceback" not in nobody.stderr
