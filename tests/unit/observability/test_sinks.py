"""Where a step's metrics end up: metrics.jsonl, W&B, the tracker that feeds them, the logs beside them."""

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from forge.observability.jsonl import JSONLSink, read_rows, rewind
from forge.observability.logs import StderrHandler, configure_logging
from forge.observability.tracker import Tracker


class ListSink:
    def __init__(self, error: Exception | None = None) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self._error = error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1
        if self._error:
            raise self._error


def test_every_sink_gets_every_step_and_is_closed_once() -> None:
    sinks = [ListSink(), ListSink()]
    with Tracker(sinks) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
        tracker.log(2, {})
        tracker.close()
    for sink in sinks:
        assert sink.rows == [(1, {"reward/mean": 0.5}), (2, {})]
        assert sink.closed == 1


def test_a_sink_that_fails_to_close_is_reported_after_the_others_are_closed() -> None:
    sinks = [ListSink(), ListSink(OSError("disk full")), ListSink(OSError("later"))]
    with pytest.raises(OSError, match="later"):
        Tracker(sinks).close()
    assert [sink.closed for sink in sinks] == [1, 1, 1]


def test_every_step_is_on_disk_as_one_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    sink = JSONLSink(path)
    for step in (1, 2):
        sink.log(step, {"reward/mean": step / 4, "loss/kl": math.nan})
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, step + 1))
    assert rows[1]["reward/mean"] == 0.5 and math.isnan(rows[1]["loss/kl"])
    assert rows[1]["time"] >= rows[0]["time"] > 1.6e9
    sink.close()


def log_to_wandb(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """One step, in a process of its own (wandb keeps what it once was told) where nobody is logged in."""
    code = """
import sys
from pathlib import Path
from forge.observability.wandb import WandbSink
sink = WandbSink("forge", "a run", {"steps": 1}, Path(sys.argv[1]))
sink.log(1, {"reward/mean": 0.5})
sink.close()
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    home = {"HOME": str(folder), "NETRC": str(folder / "netrc")}
    command = [sys.executable, "-c", code, str(folder / "out")]
    env = {**clean, **home, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=120)


def test_wandb_works_offline(tmp_path: Path) -> None:
    done = log_to_wandb(tmp_path, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    [log] = (tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb")
    assert b"reward/mean" in log.read_bytes()


def test_wandb_without_a_login_is_a_configuration_error(tmp_path: Path) -> None:
    last = log_to_wandb(tmp_path).stderr.strip().splitlines()[-1]
    assert last.startswith("forge.errors.ConfigError: logging.wandb is on, but W&B can't start")
    assert "WANDB_MODE=offline" in last


def test_log_lines_have_one_format_and_only_ours_show_info() -> None:
    code = """
import logging
from forge.observability.logs import configure_logging
configure_logging(process="actor")
configure_logging(process="trainer 0")
logging.getLogger("forge.weights").info("published %s", 3)
logging.getLogger("apps.grpo.main").info("step")
logging.getLogger("vllm").info("hidden")
logging.getLogger("vllm").warning("shown")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert [line.split(" ", 1)[1] for line in done.stderr.splitlines()] == [
        "INFO [trainer 0] forge.weights: published 3",
        "INFO [trainer 0] apps.grpo.main: step",
        "WARNING [trainer 0] vllm: shown",
    ]


def test_log_lines_follow_a_replaced_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    configure_logging()
    try:
        logging.getLogger("forge.x").info("to the captured stream")
        assert "INFO forge.x: to the captured stream" in capsys.readouterr().err
    finally:
        for handler in [h for h in root.handlers if isinstance(h, StderrHandler)]:
            root.removeHandler(handler)


@pytest.mark.parametrize("torn", ['{"step": 2, "loss/', "\0" * 50 + "\n", "\xff\n"])
def test_a_metrics_file_goes_on_behind_the_step_that_was_saved(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JSONLSink(path)
    for step in range(4):
        sink.log(step, {"loss/total": float(step)})
    sink.close()
    with path.open("ab") as file:
        file.write(torn.encode("latin-1"))  # the run was killed here, or the machine went down
    rewind(path, 9)
    assert [row["step"] for row in map(json.loads, path.read_text().splitlines())] == [0, 1, 2, 3]
    sink = JSONLSink(path, go_on=True)
    rewind(path, 2)
    sink.log(3, {"loss/total": 30.0})
    sink.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["loss/total"]) for row in rows] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    with path.open("ab") as file:
        file.write(bytes(40) + b"\n")  # the machine went down here
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2, 3]
    rewind(path, 3)
    assert path.read_bytes().endswith(b"}\n") and read_rows(path) == rows
