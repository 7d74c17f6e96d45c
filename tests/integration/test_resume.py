"""A GRPO run that is killed and resumed against the same run left alone: equal to the bit."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts/bench"))

from resume import command, differences, outcome, resumed, run, run_until_killed  # noqa: E402

from tests.integration.stopped_run import stop_after  # noqa: E402
from tests.integration.test_app import only_folder  # noqa: E402

STEPS = 6
OVERRIDES = (
    *(f"steps={STEPS}", "rollout_threads=3", "training.batch_size=3", "grpo.n_samples=4"),
    *("ref_model=null", "loss.beta=0"),
    "checkpoint.interval=2",  # the stop comes between two, and saves a step that is half generated
    # the entropy bonus gives a gradient where a random model earns no reward at all
    *(
        "training.learning_rate=1e-3",
        "training.entropy_coef=0.1",
        "training.seq_len=192",
        "grpo.max_tokens=8",
    ),
    *("evaluation.every=3", "evaluation.size=2", "evaluation.n_samples=2", "evaluation.max_tokens=4"),
)


def test_a_run_that_is_killed_and_interrupted_goes_on_to_the_bit_and_is_done_once(
    tiny_llama: Path, tmp_path: Path
) -> None:
    overrides = (*OVERRIDES, f"model={tiny_llama}")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(command(whole, *overrides))
    code = run_until_killed(command(killed, *overrides), after_rows=3, delay_s=0.05)
    assert code == -signal.SIGKILL
    again = resumed(killed, *overrides)
    assert again[-1] == "--resume"
    stop_after("step ", again, tmp_path / "log", signal.SIGINT, num_processes=6)
    assert (only_folder(killed) / "report.png").exists()
    run(again)
    assert [row["step"] for row in outcome(whole)["rows"]] == list(range(STEPS + 1))
    assert "evaluation/avg@2" in outcome(whole)["rows"][3]
    assert outcome(whole)["rows"][1]["loss/total"] != outcome(whole)["rows"][2]["loss/total"]
    assert differences(outcome(whole), outcome(killed)) == []

    done = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "has done its 6 steps: none is left" in done.stdout
