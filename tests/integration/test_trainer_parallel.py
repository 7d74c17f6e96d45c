"""Several processes train as one does: FSDP, tensor parallel, replicas, and two at once, over gloo."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

TIMEOUT_S = 280
FSDP = {"data_parallel_shard_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}
REPLICATE = {"data_parallel_replicate_degree": 2}


@dataclass(frozen=True)
class Outcome:
    """What one plan led to."""

    ranks: list[dict[str, Any]]  # what each rank saw
    weights: dict[str, Tensor]  # after two steps


def run_ranks(out: Path, world_size: int, plans: list[dict[str, Any]]) -> list[Outcome]:
    """Runs every plan, one after the other, in the same processes."""
    out.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.integration.trainer_worker", str(out), json.dumps(plans)]
    shared = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(world_size):
            env = {**os.environ, **{k: str(v) for k, v in shared.items()}, "OMP_WAIT_POLICY": "PASSIVE"}
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (out / f"rank{rank}.log").open("w") as log:
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, text=True))
        for rank, process in enumerate(processes):
            assert process.wait(TIMEOUT_S) == 0, (out / f"rank{rank}.log").read_text()
    finally:
        for process in processes:
            process.kill()
    told = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world_size)]
    return [
        Outcome([facts[i] for facts in told], load_file(out / f"model{i}/model.safetensors"))
        for i in range(len(plans))
    ]


@pytest.fixture(scope="module")
def outcomes(
    tiny_llama: Path, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Outcome]:
    """The outcome for a model on one process or on several; each pool of processes runs once."""
    folders = {"llama, tied": str(tiny_llama), "qwen3, untied": str(tiny_qwen3)}
    pools = {1: [{}], 2: [FSDP, TENSOR, REPLICATE], 4: [FSDP | TENSOR]}
    found: dict[str, Outcome] = {}

    def outcome(model: str, parallelism: dict[str, int], dtype: str = "float32") -> Outcome:
        world_size = 2 ** len(parallelism)
        key = f"{model} {parallelism} {dtype}"
        if key not in found:
            cases = [(m, p, "float32") for m in folders for p in pools[world_size]]
            cases += [("llama, tied", p, "bfloat16") for p in pools[world_size][:1] if world_size < 4]
            plans = [{"folder": folders[m], "parallelism": p, "dtype": d} for m, p, d in cases]
            ran = run_ranks(tmp_path_factory.mktemp("ranks") / str(world_size), world_size, plans)
            found.update({f"{m} {p} {d}": o for (m, p, d), o in zip(cases, ran, strict=True)})
        return found[key]

    return outcome


@pytest.mark.parametrize("model", ["llama, tied", "qwen3, untied"])
@pytest.mark.parametrize(
    "parallelism",
    [FSDP, TENSOR, REPLICATE, pytest.param(FSDP | TENSOR, marks=pytest.mark.slow)],
    ids=["fsdp", "tensor", "replicate", "fsdp x tensor"],
)
def test_several_processes_learn_what_one_does(
    outcomes: Callable[..., Outcome], model: str, parallelism: dict[str, int], request: pytest.FixtureRequest
) -> None:
    alone, together = outcomes(model, {}), outcomes(model, parallelism)
    [want], got = alone.ranks, together.ranks[0]
    assert all(facts == got for facts in together.ranks)  # every rank tells the same
    for step, expected in zip(got["steps"], want["steps"], strict=True):
        assert step == pytest.approx(expected, abs=1e-4)
    assert got["reference"] == pytest.approx(want["reference"], abs=1e-4)
    assert got["error"].startswith("the loss of episode episode-")

    before = load_file(request.getfixturevalue(f"tiny_{model.split(',')[0]}") / "model.safetensors")
    assert set(together.weights) == set(alone.weights) == set(before)
    for name, weight in alone.weights.items():
        assert (together.weights[name] - weight).abs().max() < 1e-4, name
        assert (weight - before[name]).abs().max() > 1e-3, name


def test_bfloat16_on_two_processes_stays_close_to_one(outcomes: Callable[..., Outcome]) -> None:
    [one] = outcomes("llama, tied", {}, "bfloat16").ranks
    two, _ = outcomes("llama, tied", FSDP, "bfloat16").ranks
    for name, rel in (("loss", 0.05), ("grad_norm", 0.05)):
        assert two["steps"][0][name] == pytest.approx(one["steps"][0][name], rel=rel)
    assert (torch.tensor(two["reference"]) - torch.tensor(one["reference"])).abs().mean() < 0.04
