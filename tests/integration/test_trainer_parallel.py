"""Parity table: several processes, under every layout, train as plain transformers and torch do in one.

Run it with `-rP` to read the table: the largest difference of any weight after five steps.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.integration.loss_cases import FIRST_BETA, KL_TARGET, losses, plain_loss
from tests.integration.plain_training import PlainRun, plain_logprobs, train_plainly
from tests.integration.trainer_worker import MASKED, PROBE, advantages_of, all_groups
from tests.tiny import make_tiny_model

TIMEOUT_S = 500
SHARD = "data_parallel_shard_degree"
REPLICATE = "data_parallel_replicate_degree"
TENSOR = "tensor_parallel_degree"
PIPELINE = "pipeline_parallel_degree"
CONTEXT = "context_parallel_degree"
SCHEDULE = "pipeline_parallel_schedule"


@dataclass(frozen=True)
class Plan:
    """One row of the table."""

    layout: str
    parallelism: dict[str, Any]
    model: str  # family and whether embeddings are tied
    rows: str
    accumulation: int
    training: dict[str, Any] = field(default_factory=dict)
    by_tokens: bool = False  # a mean over tokens, by a loss that reads logits
    more: bool = False  # the reference and a broken episode, too

    def __str__(self) -> str:
        extras = [*self.training, "by tokens"] if self.by_tokens else [*self.training]
        return ", ".join([self.layout, self.model, self.rows, f"x{self.accumulation}", *extras])

    @property
    def world_size(self) -> int:
        degrees = [value for name, value in self.parallelism.items() if name != SCHEDULE]
        return torch.tensor(degrees).prod().item()


INTERLEAVED = {PIPELINE: 2, SCHEDULE: "Interleaved1F1B"}
LORA = {"lora": {"rank": 4, "alpha": 12.0}}
FULL, SELECTIVE = {"activation_checkpoint": "full"}, {"activation_checkpoint": "selective"}
# Under TP a new shape takes DTensor a second, and every micro-batch has a shape of its own: two are enough
TWO = [
    Plan("FSDP 2", {SHARD: 2}, "llama tied", "shared", 1, more=True),
    Plan("FSDP 2", {SHARD: 2}, "qwen3", "padded", 4, FULL),
    Plan("FSDP 2", {SHARD: 2}, "qwen3 tied", "packed", 4, {"cpu_offload": True}, by_tokens=True),
    Plan("TP 2", {TENSOR: 2}, "llama tied", "packed", 1, more=True),
    Plan("TP 2", {TENSOR: 2}, "qwen3", "shared", 2, SELECTIVE, by_tokens=True),
    Plan("HSDP 2 x 1", {REPLICATE: 2}, "llama", "shared", 4),
    Plan("HSDP 2 x 1", {REPLICATE: 2}, "qwen3 tied", "padded", 1),
    Plan("PP 2 1F1B", {PIPELINE: 2}, "llama", "shared", 4, more=True),
    Plan("PP 2 1F1B", {PIPELINE: 2}, "qwen3", "padded", 1, FULL),
    Plan("PP 2 Interleaved1F1B", INTERLEAVED, "qwen3", "packed", 4, by_tokens=True),
    Plan("PP 2 Interleaved1F1B", INTERLEAVED, "llama", "shared", 5),
    Plan("PP 2 GPipe", {PIPELINE: 2, SCHEDULE: "GPipe"}, "llama", "padded", 1, SELECTIVE),
    Plan("CP 2", {CONTEXT: 2}, "llama tied", "shared", 1, by_tokens=True, more=True),
    Plan("CP 2", {CONTEXT: 2}, "qwen3", "packed", 4),
    Plan("FSDP 2", {SHARD: 2}, "llama", "shared", 4, LORA),
    Plan("TP 2", {TENSOR: 2}, "llama", "packed", 1, LORA),
    Plan("PP 2 1F1B", {PIPELINE: 2}, "llama", "shared", 4, {**LORA, **FULL}),
    Plan("CP 2", {CONTEXT: 2}, "llama", "shared", 1, LORA),
]
FOUR = [
    Plan("FSDP 4", {SHARD: 4}, "llama tied", "padded", 4),
    Plan("FSDP 4", {SHARD: 4}, "qwen3", "shared", 1, by_tokens=True),
    Plan("FSDP 2 x TP 2", {SHARD: 2, TENSOR: 2}, "llama tied", "shared", 2),
    Plan("FSDP 2 x TP 2", {SHARD: 2, TENSOR: 2}, "qwen3", "packed", 1),
    Plan("FSDP 2 x TP 2", {SHARD: 2, TENSOR: 2}, "llama", "shared", 1, LORA),
    Plan("HSDP 2 x 2", {REPLICATE: 2, SHARD: 2}, "qwen3 tied", "shared", 4),
    Plan("PP 2 x FSDP 2", {PIPELINE: 2, SHARD: 2}, "llama", "shared", 4, more=True),
    Plan("PP 2 x FSDP 2", {**INTERLEAVED, SHARD: 2}, "qwen3", "padded", 1),
    Plan("PP 2 x TP 2", {PIPELINE: 2, TENSOR: 2}, "qwen3", "shared", 2),
    Plan("PP 2 x CP 2", {**INTERLEAVED, CONTEXT: 2}, "llama", "packed", 1),
    Plan("CP 2 x FSDP 2", {CONTEXT: 2, SHARD: 2}, "qwen3", "shared", 4, by_tokens=True),
    Plan("CP 2 x TP 2", {CONTEXT: 2, TENSOR: 2}, "llama tied", "packed", 1),
]
BFLOAT16 = [
    Plan("FSDP 2", {SHARD: 2}, "llama tied", "shared", 4, {"dtype": "bfloat16"}),
    Plan("PP 2 1F1B", {PIPELINE: 2}, "llama", "packed", 4, {"dtype": "bfloat16"}),
    Plan("CP 2", {CONTEXT: 2}, "qwen3", "shared", 4, {"dtype": "bfloat16"}),
]
COMPILED = Plan("FSDP 2", {SHARD: 2}, "qwen3", "shared", 1, {"compile": True})


@dataclass(frozen=True)
class Outcome:
    """What one plan led to."""

    ranks: list[dict[str, Any]]  # what each rank saw
    weights: dict[str, Tensor]  # after all steps


def run_ranks(out: Path, world_size: int, plans: list[dict[str, Any]]) -> list[Outcome]:
    """Runs every plan, one after the other, in the same processes."""
    out.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.trainer_worker", str(out), json.dumps(plans)],
        env={**os.environ, **{name: str(value) for name, value in env.items()}},
        start_new_session=True,
    )
    try:
        failed = process.wait(TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert not failed, "\n".join(log.read_text() for log in sorted(out.glob("*.log")))
    told = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world_size)]
    return [
        Outcome([facts[i] for facts in told], load_file(out / f"model{i}/model.safetensors"))
        for i in range(len(plans))
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of four layers by family, and whether embeddings are tied."""
    root = tmp_path_factory.mktemp("models")
    return {
        f"{family}{' tied' * tied}": make_tiny_model(
            root / f"{family}{tied}", family, tied=tied, num_hidden_layers=4
        )
        for family in ("llama", "qwen3")
        for tied in (False, True)
    }


@pytest.fixture(scope="module")
def outcome_of(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Plan], Outcome]:
    """The outcome of a plan; the processes of one pool run all of its plans once."""
    root = tmp_path_factory.mktemp("ranks")

    @cache
    def pool(number: int) -> dict[str, Outcome]:
        plans = [[*TWO, *BFLOAT16, COMPILED], FOUR][number]
        told = [
            {
                **asdict(plan),
                "folder": str(folders[plan.model]),
                "training": {"gradient_accumulation_steps": plan.accumulation, **plan.training},
            }
            for plan in plans
        ]
        ran = run_ranks(root / str(number), plans[0].world_size, told)
        return {str(plan): outcome for plan, outcome in zip(plans, ran, strict=True)}

    def outcome(plan: Plan) -> Outcome:
        return pool(int(plan.world_size == 4))[str(plan)]

    return outcome


@pytest.fixture(scope="module")
def plain_run(folders: dict[str, Path]) -> Callable[[Plan], PlainRun]:
    """What one process with transformers alone would have seen of a plan."""

    @cache
    def run(model: str, temperature: float, by_tokens: bool, has_lora: bool) -> PlainRun:
        groups = all_groups()
        advantages = advantages_of(groups)
        del groups[MASKED], advantages[MASKED]
        flat = [replace(c, temperature=temperature) for group in groups for c in group]
        lora = LORA["lora"] if has_lora else None
        return train_plainly(folders[model], flat, torch.cat(advantages), by_tokens=by_tokens, lora=lora)

    return lambda plan: run(
        plan.model, 1.0 if plan.rows == "padded" else 0.7, plan.by_tokens, "lora" in plan.training
    )


@pytest.mark.parametrize("plan", [*TWO, COMPILED, *FOUR], ids=str)
def test_several_processes_learn_what_plain_torch_does(
    outcome_of: Callable[[Plan], Outcome], plain_run: Callable[[Plan], PlainRun], plan: Plan
) -> None:
    plain, outcome = plain_run(plan), outcome_of(plan)
    assert set(outcome.weights) == set(plain.weights)
    difference = max(float((w - plain.weights[name]).abs().max()) for name, w in outcome.weights.items())
    print(f"{plan!s:70} {difference:.1e}")
    assert difference < 1e-4

    seen = outcome.ranks[0]
    for name, values in (("loss", plain.losses), ("grad_norm", plain.grad_norms)):
        assert [step[name] for step in seen["steps"]] == pytest.approx(values, rel=1e-4, abs=1e-4)
    assert seen["evaluated"] == pytest.approx(plain.losses[0], abs=1e-4)
    assert seen["steps"][0]["length_max"] == 9.0
    assert seen["steps"][0]["num_tokens"] == 59.0
    with torch.no_grad():
        logprobs = torch.log_softmax(plain.model(torch.tensor([PROBE[:-1]])).logits[0], -1)
    scores = logprobs.gather(-1, torch.tensor(PROBE[1:])[:, None])[:, 0]
    assert seen["scores"] == pytest.approx(scores.tolist(), abs=1e-4)
    for rank in outcome.ranks:  # all tell the same
        own = {"pieces": 0, "published": 0, "agreed": 0}
        assert {**rank, **own} == {**seen, **own}
        assert rank["published"] < 1e-6
    every_value_is_published_once(outcome)


def every_value_is_published_once(outcome: Outcome) -> None:
    times = {name: torch.zeros(weight.shape) for name, weight in outcome.weights.items()}
    for rank in outcome.ranks:
        for name, offsets, shape in rank["pieces"]:
            times[name][tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))] += 1
    assert all((count == 1).all() for count in times.values())


@pytest.mark.parametrize("plan", [plan for plan in (*TWO, *FOUR) if plan.more], ids=str)
def test_the_reference_agrees_and_a_broken_episode_is_named(
    outcome_of: Callable[[Plan], Outcome], folders: dict[str, Path], plan: Plan
) -> None:
    seen = outcome_of(plan).ranks[0]
    model = AutoModelForCausalLM.from_pretrained(folders[plan.model], dtype=torch.float32)
    with torch.no_grad():
        want = torch.cat([plain_logprobs(model, c) for group in all_groups() for c in group])
    assert seen["reference"] == pytest.approx(want.tolist(), abs=1e-4)
    assert seen["error"].startswith("NotFinite: the loss of episode episode-")


@pytest.mark.parametrize("plan", [plan for plan in (*TWO, *FOUR) if plan.more], ids=str)
def test_losses_of_all_kinds_are_what_one_process_computes_and_their_state_is_the_same_everywhere(
    outcome_of: Callable[[Plan], Outcome], plain_run: Callable[[Plan], PlainRun], plan: Plan
) -> None:
    groups = all_groups()
    advantages = advantages_of(groups)
    del groups[MASKED], advantages[MASKED]
    model, flat = plain_run(plan).model, [completion for group in groups for completion in group]
    told = [rank["losses"] for rank in outcome_of(plan).ranks]
    for name, loss in losses().items():
        value, norm, metrics = plain_loss(model, flat, torch.cat(advantages), loss)
        got_value, got_norm, got_metrics = told[0][name]
        assert got_value == pytest.approx(value, rel=2e-3, abs=1e-4), name
        assert got_norm == pytest.approx(norm, rel=2e-3, abs=1e-4), name
        assert {n: got_metrics[n] for n in metrics} == pytest.approx(metrics, rel=2e-3, abs=1e-4), name
    beta = FIRST_BETA
    for seen, kl in zip(told[0]["betas"], [None, *told[0]["kls"]], strict=True):
        if kl is not None:  # arXiv 1909.08593, section 2.2
            beta *= 1 + 0.1 * max(-0.2, min(0.2, kl / KL_TARGET - 1))
        assert seen == pytest.approx(beta, rel=1e-6)
    assert beta != FIRST_BETA
    assert all(rank["betas"] == told[0]["betas"] for rank in told)  # to the bit


@pytest.mark.parametrize("plan", [plan for plan in (*TWO, *FOUR) if plan.more], ids=str)
def test_what_is_asked_of_a_batch_is_told_everywhere_and_a_ratio_is_exactly_one(
    outcome_of: Callable[[Plan], Outcome], plain_run: Callable[[Plan], PlainRun], plan: Plan
) -> None:
    flat = [c for i, group in enumerate(all_groups()) if i != MASKED for c in group]
    ranks = outcome_of(plan).ranks
    with torch.no_grad():
        want = torch.cat([plain_logprobs(plain_run(plan).model, c) for c in flat])
    weights = (want - torch.cat([c.logprobs for c in flat])).exp().double()
    ess = float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
    assert ranks[0]["ess"] == pytest.approx(ess, rel=2e-3)
    assert ranks[0]["logprobs"] == pytest.approx(want.tolist(), rel=2e-3, abs=1e-3)
    assert ranks[0]["norms"][0] == pytest.approx(ranks[0]["norms"][1], rel=1e-4) != 0
    for rank in ranks:
        assert (rank["ratios"], rank["masked"]) == ([1.0, 1.0], 0.0)  # to the bit
        assert rank["logprobs"] == pytest.approx(ranks[0]["logprobs"], abs=1e-6)


@pytest.mark.parametrize("plan", BFLOAT16, ids=str)
def test_bfloat16_stays_close(
    outcome_of: Callable[[Plan], Outcome], plain_run: Callable[[Plan], PlainRun], plan: Plan
) -> None:
    plain, outcome = plain_run(plan), outcome_of(plan)
    first = outcome.ranks[0]["steps"][0]
    assert first["loss"] == pytest.approx(plain.losses[0], rel=0.05)
    assert first["grad_norm"] == pytest.approx(plain.grad_norms[0], rel=0.05)


@pytest.mark.parametrize("plan", [plan for plan in (*TWO, *FOUR) if plan.more], ids=str)
def test_what_goes_wrong_on_one_process_is_told_on_every_process(
    outcome_of: Callable[[Plan], Outcome], plan: Plan
) -> None:
    division = "ZeroDivisionError: integer division or modulo by zero"
    ranks = outcome_of(plan).ranks
    refusal = "the weights were updated, but after_step of the loss failed: NotFinite: no"
    for number, rank in enumerate(ranks):
        assert rank["told"] == f"ForgeError: rank {len(ranks) - 1}: {refusal}"
        assert rank["agreed"] == (f"ForgeError: rank 0: {division}" if number else division)
        where = f"data-parallel rank {rank['num_dp'] - 1}: " if rank["num_dp"] > 1 else ""
        assert rank["raised"] == f"ForgeError: {where}the loss: ZeroDivisionError: the loss has no idea"
        assert "has 67 tokens, training.seq_len is 64" in rank["refused"]
