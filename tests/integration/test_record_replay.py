"""Rollouts are recorded without a trainer, trained on without generators, and a step is done again.

Every part real, as a user runs it; the model tiny.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from apps.grpo.replay_step import replay_step
from forge.data_models import Episode
from forge.errors import ConfigError
from forge.rl.record import read, read_step, write
from tests.integration.test_app import command, only_folder, run

STEPS, N, UPDATES = 3, 4, 4
ENTROPY = 0.1
ALGORITHM = ("loss.name=ppo", f"loss.entropy_coef={ENTROPY}", "loss.correction={kind: decoupled}")
TRAINING = ("training.learning_rate=3e-5", "training.minibatches=2", "training.ppo_epochs=2")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.fixture(scope="module")
def rollouts(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without a trainer."""
    out = tmp_path_factory.mktemp("rollouts")
    done = run(*command(tiny_llama, out, "rollout_only=true", "ref_model=null", *ALGORITHM))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{STEPS * 2 * N} answers to {STEPS * 2} questions: reward 0.0000 +- 0.0000, " in done.stdout
    return only_folder(out)


def test_rollouts_alone_are_measured_and_recorded(rollouts: Path) -> None:
    recorded = list(read(rollouts))
    assert [(each.step, each.version) for each in recorded] == [(step, 0) for step in range(1, STEPS + 1)]
    assert not (rollouts / "model").exists()
    ids = [e.episode_id for each in recorded for e in each.episodes]
    assert sorted(ids) == sorted(f"{number}/{i}" for number in range(STEPS * 2) for i in range(N))
    for row, each in zip(rows_of(rollouts), recorded, strict=True):
        lengths = [len(e.completion.token_ids) for e in each.episodes]
        assert row["rollouts/length"] == pytest.approx(sum(lengths) / len(lengths))
        assert row["rollouts/reward"] == pytest.approx(sum(e.reward for e in each.episodes) / len(lengths))
        assert all(e.completion.generator_version == 0 for e in each.episodes)


@pytest.fixture(scope="module")
def graded(rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same episodes by another grader: a random model gets no reward at all."""
    folder = tmp_path_factory.mktemp("graded")
    for each in read(rollouts):
        episodes = [replace(e, advantage=math.cos(2.0 * i)) for i, e in enumerate(each.episodes)]
        write(folder, each.step, episodes, each.version)
    return folder


@pytest.fixture(scope="module")
def trained(graded: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was trained on these."""
    out = tmp_path_factory.mktemp("trained")
    overrides = (f"replay={graded}", "ref_model=null", "checkpoint.interval=2", *ALGORITHM, *TRAINING)
    done = run(*command(tiny_llama, out, *overrides))
    assert done.returncode == 0, done.stderr[-3000:]
    return only_folder(out)


def test_recorded_episodes_are_trained_on_without_generators(
    graded: Path, trained: Path, tiny_llama: Path
) -> None:
    rows = rows_of(trained)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row, each in zip(rows, read(graded), strict=True):
        num_tokens = sum(len(e.completion.token_ids) for e in each.episodes)
        assert row["trainer/num_tokens"] == 2 * num_tokens  # once in each epoch
        assert 0 < row["loss/ess"] <= 1
        assert not [name for name in row if name.startswith(("generator/", "reward/"))]
    before = AutoModelForCausalLM.from_pretrained(tiny_llama).state_dict()
    after = AutoModelForCausalLM.from_pretrained(trained / "model").state_dict()
    assert any((before[name] - after[name]).abs().max() > 1e-5 for name in before)


def test_a_step_is_done_again_from_its_checkpoint_to_the_bit(
    graded: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = contents(trained)
    file = tmp_path / "step.json"
    replay_step(trained, 3, num_tokens=5, json_file=file)
    told = capsys.readouterr().out
    assert contents(trained) == found
    assert f"step 3 of {trained}, from the checkpoint of step 2" in told
    assert "bit-equal to metrics.jsonl: loss/" in told, told[-3000:]
    seen, row = json.loads(file.read_text()), rows_of(trained)[2]
    assert (seen["started_from"], len(seen["updates"])) == (2, UPDATES)
    assert sum(update["loss"] for update in seen["updates"]) / UPDATES == row["loss/total"]
    _assert_terms(seen, {e.episode_id: e for e in read_step(graded, 3).episodes})


def _assert_terms(seen: dict[str, Any], episodes: dict[str, Episode]) -> None:
    """Those of decoupled PPO, of the first update's tokens: then, and in the second epoch."""
    first = {_place(token): token for token in seen["tokens"] if token["update"] == 1}
    again = {
        _place(token): token for token in seen["tokens"] if token["update"] > 2 and _place(token) in first
    }
    assert len(first) == len(again) == seen["updates"][0]["num_tokens"]
    for place, token in first.items():
        episode = episodes[token["episode"]]
        generator = float(episode.completion.logprobs[token["position"]])
        assert (token["generator_logprob"], token["advantage"]) == pytest.approx(
            (generator, episode.advantage)
        )
        weight, advantage = math.exp(token["trainer_logprob"] - generator), token["advantage"]
        ratio = math.exp(again[place]["trainer_logprob"] - token["trainer_logprob"])
        assert (token["ratio"], token["term"]) == (1.0, pytest.approx(-weight * advantage, rel=1e-4))
        bounded = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        assert again[place]["ratio"] == pytest.approx(ratio, rel=1e-4)
        assert again[place]["term"] == pytest.approx(-weight * bounded, rel=1e-4)
    mean = sum(token["term"] for token in first.values()) / len(first)
    told = seen["updates"][0]
    assert told["loss"] == pytest.approx(mean - ENTROPY * told["entropy"], rel=1e-4)


def _place(token: dict[str, Any]) -> tuple[str, int]:
    return token["episode"], token["position"]


def test_what_is_not_there_can_not_be_done_again(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder of a run"):
        replay_step(tmp_path, 1)
    with pytest.raises(ConfigError, match="step 9 is not recorded in"):
        replay_step(trained, 9)
