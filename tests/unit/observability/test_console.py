"""The console: a line a step on a pipe; on a terminal a display that other output never tears."""

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections import deque

import pytest
from rich.console import Console

from forge.observability import console
from forge.observability.console import LineSink, Progress, clock, render, sparkline
from forge.observability.view import SFT_VIEW

VALUES = {
    "reward/mean": 0.75,
    "loss/total": -0.0123,
    "loss/kl": 0.004,
    "loss/entropy": 1.25,
    "logprob_gap/mean": 0.011,
    "staleness/mean": 0.5,
    "throughput/tokens_per_s": 412.4,
    "time/step_s": 6.8,
    "time/generate_s": 2.0,
    "time/train_s": 4.25,
}


def displayed(progress: Progress) -> list[str]:
    """The lines of the display."""
    stream = io.StringIO()
    Console(file=stream, width=200).print(render(progress))
    return [line.strip() for line in stream.getvalue().splitlines()]


def test_a_pipe_gets_one_line_a_step_with_everything() -> None:
    stream = io.StringIO()
    sink = LineSink(120, stream)
    sink.log(7, VALUES)
    [line] = stream.getvalue().splitlines()
    assert line == (
        "step   7/120  reward 0.750  loss -0.0123  kl 0.0040  entropy 1.250  logprob gap 0.0110  "
        "staleness 0.5  tokens/s 412  step time 6.80 s (train 4.25, generate 2.00)  ETA -"
    )


def test_an_evaluation_stands_in_its_step_and_stays_on_the_display() -> None:
    stream = io.StringIO()
    sink, progress = LineSink(40, stream), Progress(40)
    found = {"evaluation/avg@16": 0.25, "evaluation/pass@16": 0.5, "evaluation/pass@2": 0.375}
    for step, values in (
        (0, {**found, "evaluation/stderr": 1.0}),
        (1, VALUES),
        (2, {"evaluation/avg@16": 0.125}),
    ):
        sink.log(step, values)
        progress.update(step, values)
    first, second, third = stream.getvalue().splitlines()
    assert "  avg@16 0.250  pass@2 0.375  pass@16 0.500  step time -" in first
    assert "@" not in second and "  avg@16 0.125  step time" in third
    assert displayed(progress)[-1] == "evaluation avg@16 0.125   at step 2, best 0.250 at 0"


def test_long_work_within_a_step_is_told_a_log_now_and_then_and_stands_on_the_display(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    stream = io.StringIO()
    sink = LineSink(40, stream)
    for now in range(100):
        sink.doing(f"evaluation: questions answered {now}/200")
        if now == 40:
            sink.log(1, {})
    told = [line for line in stream.getvalue().splitlines() if not line.startswith("step")]
    assert told == [f"evaluation: questions answered {i}/200" for i in (31, 71)]
    progress = Progress(40)
    progress.doing = "evaluation: questions answered 5/200"
    assert displayed(progress)[-1] == progress.doing
    progress.update(1, {"loss/kl": 0.0})
    assert not any("answered" in line for line in displayed(progress))


def test_a_missing_metric_shows_as_a_dash() -> None:
    stream = io.StringIO()
    LineSink(2, stream).log(1, {"loss/kl": float("nan"), "made/up": 3.0})
    assert stream.getvalue() == (
        "step 1/2  reward -  loss -  kl nan  entropy -  logprob gap -  staleness -  tokens/s -  "
        "step time -  ETA -\n"
    )


def test_an_app_may_show_other_metrics_and_tell_its_steps_later() -> None:
    stream = io.StringIO()
    sink = LineSink(None, stream, SFT_VIEW)
    sink.log(0, {"validation/loss": 2.5})
    sink.expect(80)
    sink.log(1, {"loss/total": 2.25, "trainer/grad_norm": 3.0, "trainer/lr": 5e-5, "data/epoch": 0.02})
    first, second = stream.getvalue().splitlines()
    assert first.startswith("step 0/-  loss -  validation 2.5000  grad norm -")
    assert second == (
        "step  1/80  loss 2.2500  validation -  grad norm 3.00  lr 5.00e-05  epoch 0.02  tokens/s -  "
        "step time -  ETA 0:00"
    )


def test_the_eta_follows_the_pace_of_the_last_steps() -> None:
    progress = Progress(10)
    for step in (1, 2, 3):
        time.sleep(0.05)
        progress.update(step, {})
    assert progress.eta_s == pytest.approx(7 * 0.05, rel=0.5)
    progress.update(10, {})
    assert progress.eta_s == 0


def test_a_sparkline_spans_its_values_and_survives_nan() -> None:
    assert sparkline(deque([0.0, 0.5, float("nan"), 1.0])) == "▁▄ █"
    assert sparkline(deque([0.3, 0.3])) == "▁▁"
    assert sparkline(deque()) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (5.4, "0:05"), (75.2, "1:15"), (3725.0, "1:02:05")]
)
def test_seconds_read_as_a_clock(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


def run_in_terminal(code: str, timeout_s: float = 60.0) -> tuple[int, str]:
    """Runs Python code on a pseudo-terminal; returns its exit code and all it wrote there."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    written, deadline = b"", time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline and select.select([controller], [], [], 1.0)[0] + [
            process.poll()
        ] != [0]:
            try:
                chunk = os.read(controller, 1 << 16)
            except OSError:  # the terminal's other end is closed
                break
            written += chunk
        return process.wait(timeout=10), written.decode(errors="replace")
    finally:
        process.kill()
        os.close(controller)


RUN = """
import logging, subprocess, sys, time
from forge.observability.console import console_sink
from forge.observability.logs import configure_logging
from forge.observability.tracker import Tracker
configure_logging()
with Tracker([console_sink(4, "a title")]) as tracker:
    code = "import sys; print('from a child', flush=True); sys.stdin.read(); print('late')"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    for step in range(1, 5):
        print("printed at", step)
        logging.getLogger("forge.x").info("logged at %d", step)
        tracker.log(step, {"reward/mean": step / 4})
        time.sleep(0.3)
    FAIL
print("after the display")
child.communicate()
assert child.returncode == 0
"""


def test_lines_of_all_processes_stand_whole_beside_the_display() -> None:
    code, screen = run_in_terminal(RUN.replace("FAIL", "pass"))
    assert code == 0, screen
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen)
    lines = [line.strip() for line in plain.split("\r\n")]
    for step in range(1, 5):
        assert sum(line.endswith(f"printed at {step}") for line in lines) == 1
        assert sum(line.endswith(f"INFO forge.x: logged at {step}") for line in lines) == 1
    assert sum(line.endswith("from a child") for line in lines) == 1
    assert lines.count("late") == 1  # written after the display was closed
    assert "a title" in plain and "step 4/4" in plain and "reward 1.000" in plain
    assert lines.index("after the display") > max(i for i, line in enumerate(lines) if "step 4/4" in line)


def test_an_error_under_the_display_is_seen_last_and_the_cursor_is_back() -> None:
    code, screen = run_in_terminal(RUN.replace("FAIL", "child.kill(); raise RuntimeError('what went wrong')"))
    assert code == 1
    assert screen.rstrip().endswith("RuntimeError: what went wrong")
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")


def test_without_close_the_error_is_still_seen() -> None:
    start = "from forge.observability.console import console_sink; console_sink(4)"
    code, screen = run_in_terminal(f"{start}\nraise RuntimeError('what went wrong')")
    assert code == 1
    assert "RuntimeError: what went wrong" in screen
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")
