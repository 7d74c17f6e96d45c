"""The SFT app as a user runs it: a run on a tiny model, the same stopped and resumed, its answers."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge.runs import has_checkpoint
from tests.integration.stopped_run import stop_after

ROOT = Path(__file__).parents[2]
STEPS = 12


def write_chats(path: Path) -> Path:
    """64 sums, each asked once."""
    questions = [(a, b) for a in range(8) for b in range(8)]
    rows = [
        [
            {"role": "user", "content": f"{a} + {b}?"},
            {"role": "assistant", "content": f"The answer is {a + b}"},
        ]
        for a, b in questions
    ]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    return path


def command(model: Path, data: Path, out: Path, *overrides: str) -> list[str]:
    return [
        *(sys.executable, "-m", "apps.sft.main", f"model={model}", f"output_dir={out}", f"steps={STEPS}"),
        *(f"dataset.path={data}", "training.dtype=float32", "training.batch_size=8"),
        *("training.learning_rate=1e-2", "training.seq_len=64", "checkpoint.interval=5"),
        *("validation.size=10", "validation.every=6", "validation.samples=3", "validation.max_tokens=12"),
        *overrides,
    ]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(args, cwd=ROOT, capture_output=True, text=True, timeout=240)


def read(out: Path) -> tuple[Path, list[dict[str, Any]]]:
    [folder] = out.iterdir()
    return folder, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_and_one_that_was_stopped_goes_on_exactly(tiny_llama: Path, tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl")
    done = run(*command(tiny_llama, data, tmp_path / "whole"))
    assert done.returncode == 0, done.stderr[-3000:]
    folder, rows = read(tmp_path / "whole")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    validated = {row["step"]: row["validation/loss"] for row in rows if "validation/loss" in row}
    assert list(validated) == [0, 6, 12] and validated[12] < 0.5 * validated[0]
    assert rows[-1]["data/epoch"] > 1 and rows[-1]["loss/total"] < 0.5 * rows[1]["loss/total"]
    assert "validation loss " in done.stdout and (folder / "report.png").exists()
    check_samples(folder)
    assert has_checkpoint(folder, STEPS)

    arguments = command(tiny_llama, data, tmp_path / "stopped", "services.generator=null")
    # before, within or after the validation of step 6
    printed = stop_after("step  5/", arguments, tmp_path / "log", signal.SIGTERM, num_processes=2)
    assert any(line.startswith("saved after step ") for line in printed)
    resumed = run(*arguments, "resume=last")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "goes on from " in resumed.stdout and "54 conversations to train on, 10 to" in resumed.stdout
    other, again = read(tmp_path / "stopped")
    losses = [
        [(r["step"], r.get("loss/total"), r.get("validation/loss")) for r in all] for all in (rows, again)
    ]
    assert losses[0] == losses[1]
    weights = [AutoModelForCausalLM.from_pretrained(f / "model").state_dict() for f in (folder, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def check_samples(folder: Path) -> None:
    """The last answers are those that transformers gives with the exported model."""
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [step for step in (0, 6, 12) for _ in range(3)]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for sample in samples[-3:]:
        prompt = [{"role": "user", "content": sample["question"]}]
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True) == sample["answer"]
        assert sample["reference"].startswith("The answer is")
        assert sample["answer"].startswith("The answer")  # and before it was trained, noise
