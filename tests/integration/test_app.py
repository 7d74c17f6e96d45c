"""The GRPO app as a user runs it: a command line, an exit code, files. Every part real, the model tiny."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge.controller.provisioner import is_running

ROOT = Path(__file__).parents[2]


def command(model: Path, out: Path, *overrides: str) -> list[str]:
    return [
        *(sys.executable, "-m", "apps.grpo.main", "--config", "apps/grpo/smollm2_135m.yaml"),
        *(f"model={model}", f"output_dir={out}", "steps=3", "rollout_threads=4"),
        *("training.batch_size=2", "grpo.n_samples=4", "training.dtype=float32", "evaluation.every=0"),
        *overrides,
    ]


def run(*args: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(args, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def only_folder(out: Path) -> Path:
    [folder] = out.iterdir()
    return folder


def descendants(pid: int) -> set[int]:
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


def test_a_run_trains_reports_and_exports(tiny_llama: Path, tmp_path: Path) -> None:
    # the entropy bonus gives a gradient where a random model earns no reward at all
    overrides = ("training.learning_rate=1e-3", "training.entropy_coef=0.1")
    done = run(*command(tiny_llama, tmp_path / "out", *overrides))
    assert done.returncode == 0, done.stderr[-3000:]
    folder = only_folder(tmp_path / "out")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    first = rows[0]
    assert abs(first["loss/kl"]) < 1e-3
    assert abs(first["loss/ratio_mean"] - 1) < 0.02
    gaps = [row["logprob_gap/mean"] for row in rows if "logprob_gap/mean" in row]  # updates overlap steps
    assert len(gaps) >= 1 and "logprob_gap/mean" in rows[-1] and all(gap < 1e-3 for gap in gaps)  # float32
    assert first["staleness/mean"] == 0 and all(row["staleness/age_max"] <= 1 for row in rows)
    assert all(row["trainer/grad_norm"] >= 0 and row["generator/num_tokens"] > 0 for row in rows)
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert f"files: {folder}" in done.stdout and "in 3 steps" in done.stdout
    # the exported model has moved away from the one it started from, and transformers reads it
    trained = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tiny_llama).state_dict()
    assert trained.keys() == before.keys()
    assert any((trained[name] - before[name]).abs().max() > 0 for name in trained)
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template


def test_a_run_whose_processes_are_killed_trains_on_and_says_what_it_cost(
    tiny_llama: Path, tmp_path: Path
) -> None:
    overrides = ("steps=20", "chaos.kill=reward,replay_buffer", "chaos.every_s=0.5")
    done = run(*command(tiny_llama, tmp_path / "out", *overrides))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = (only_folder(tmp_path / "out") / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 21))
    [line] = [line for line in done.stdout.splitlines() if line.startswith("chaos: killed ")]
    assert "back after" in line


def test_a_reward_function_that_raises_ends_the_run_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    data = tmp_path / "words.jsonl"
    data.write_text('{"question": "What is up?", "answer": "the sky"}\n' * 4)
    overrides = (f"dataset.path={data}", "dataset.options=null")
    done = run(*command(tiny_llama, tmp_path / "out", *overrides))
    assert done.returncode in (1, 2), done.stderr[-3000:]
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "MathReward" in line and "What is up?" in line and "the sky" in line


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_a_run_within_10_s_and_leave_nothing(
    tiny_llama: Path, tmp_path: Path, how: signal.Signals
) -> None:
    out = tmp_path / "out"
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        command(tiny_llama, out, "steps=100000"),
        cwd=ROOT,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background
    )
    try:
        deadline = time.monotonic() + 200
        while not any(metrics.stat().st_size for metrics in out.glob("*/metrics.jsonl")):
            told = (tmp_path / "log").read_text()[-3000:]
            assert process.poll() is None and time.monotonic() < deadline, told
            time.sleep(0.2)
        children = descendants(process.pid)
        assert len(children) >= 7
        started = time.monotonic()
        os.killpg(process.pid, how)  # as a terminal does it: the whole group
        code = process.wait(timeout=60)
        seconds = time.monotonic() - started
        left = [pid for pid in children if is_running(pid)]
    finally:
        with contextlib.suppress(ProcessLookupError):  # none is left
            os.killpg(process.pid, signal.SIGKILL)
    assert code == 130, (tmp_path / "log").read_text()[-3000:]
    assert not left and seconds < 10
    assert (only_folder(out) / "report.png").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--trainer.prcs", "4"], "did you mean trainer.procs?"),
        (["model=BARE"], "tokenizer"),
        (["dataset.path=EMPTY", "dataset.options=null"], "empty"),
        (["trainer.with_gpus=true", "trainer.procs=64", "training.batch_size=64"], "trainer wants 64 GPUs"),
    ],
    ids=["key", "model", "dataset", "GPUs"],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    tiny_llama: Path, tmp_path: Path, overrides: list[str], words: str
) -> None:
    bare, empty = tmp_path / "bare", tmp_path / "empty.jsonl"
    empty.touch()
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((tiny_llama / name).read_bytes())
    overrides = [one.replace("BARE", str(bare)).replace("EMPTY", str(empty)) for one in overrides]
    done = run(*command(tiny_llama, tmp_path / "out", *overrides))
    assert done.returncode == 2, done.stderr[-3000:]
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert words in line
    assert "Traceback" not in done.stderr


def test_a_dry_run_shows_configuration_and_placement_and_starts_nothing(tmp_path: Path) -> None:
    done = run(
        *(sys.executable, "-m", "apps.grpo.main", "--config", "apps/grpo/qwen3_1_7b.yaml"),
        *("--trainer.procs", "4", "--dry-run", f"output_dir={tmp_path / 'out'}"),
    )
    assert done.returncode == 0, done.stderr
    assert "hf://Qwen/Qwen3-1.7B" in done.stdout and "6 GPUs, " in done.stdout
    assert not (tmp_path / "out").exists()
