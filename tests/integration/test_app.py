"""The GRPO app as a user runs it: a command line, an exit code, files. Every part real, the model tiny."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from apps.grpo.config import load_config
from apps.grpo.machines import plan
from apps.grpo.main import main
from forge.app import run_app

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


def test_a_run_whose_processes_are_killed_trains_reports_and_exports(
    tiny_llama: Path, tmp_path: Path
) -> None:
    # the entropy bonus gives a gradient where a random model earns no reward at all
    overrides = ("steps=6", "training.learning_rate=1e-3", "training.entropy_coef=0.1")
    chaos = ("chaos.kill=reward,replay_buffer", "chaos.every_s=1")
    done = run(*command(tiny_llama, tmp_path / "out", *overrides, *chaos))
    assert done.returncode == 0, done.stderr[-3000:]
    folder = only_folder(tmp_path / "out")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 7))
    first = rows[0]
    assert abs(first["loss/kl"]) < 1e-3
    assert abs(first["loss/ratio_mean"] - 1) < 0.02
    gaps = [row["logprob_gap/mean"] for row in rows if "logprob_gap/mean" in row]  # updates overlap steps
    assert len(gaps) >= 1 and "logprob_gap/mean" in rows[-1] and all(gap < 1e-3 for gap in gaps)  # float32
    # what a process that is killed has recorded since the last row is lost
    assert first.get("staleness/mean", 0) == 0
    ages = [row["staleness/age_max"] for row in rows if "staleness/age_max" in row]
    assert ages and max(ages) <= 1
    assert all(row["trainer/grad_norm"] >= 0 for row in rows)
    assert first["generator/num_tokens"] > 0
    [line] = [line for line in done.stdout.splitlines() if line.startswith("chaos: killed ")]
    assert "back after" in line
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert f"files: {folder}" in done.stdout and "in 6 steps" in done.stdout
    # the exported model has moved away from the one it started from, and transformers reads it
    trained = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tiny_llama).state_dict()
    assert trained.keys() == before.keys()
    assert any((trained[name] - before[name]).abs().max() > 0 for name in trained)
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template


def test_a_reward_function_that_raises_ends_the_run_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    data = tmp_path / "words.jsonl"
    data.write_text('{"question": "What is up?", "answer": "the sky"}\n' * 4)
    overrides = (f"dataset.path={data}", "dataset.options=null", "ref_model=null", "loss.beta=0")
    done = run(*command(tiny_llama, tmp_path / "out", *overrides))
    assert done.returncode in (1, 2), done.stderr[-3000:]
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "MathReward" in line and "What is up?" in line and "the sky" in line


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=BARE"], "tokenizer"),
        (["dataset.path=EMPTY", "dataset.options=null", "ref_model=null", "loss.beta=0"], "empty"),
        (["trainer.with_gpus=true", "trainer.procs=64", "training.batch_size=64"], "trainer wants 64 GPUs"),
    ],
    ids=["model", "dataset", "GPUs"],
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


def test_a_wrong_key_is_told_before_anything_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(main, load_config, plan, ["--trainer.prcs", "4"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "did you mean trainer.procs?" in line


def test_a_dry_run_shows_configuration_and_placement_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--config", str(ROOT / "apps/grpo/qwen3_1_7b.yaml"), "--trainer.procs", "4", "--dry-run"]
    assert run_app(main, load_config, plan, [*argv, f"output_dir={tmp_path / 'out'}"]) == 0
    told = capsys.readouterr().out
    assert "hf://Qwen/Qwen3-1.7B" in told and "6 GPUs, " in told
    assert not (tmp_path / "out").exists()
