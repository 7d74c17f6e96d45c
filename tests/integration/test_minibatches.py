"""Several updates on a batch, against decoupled PPO written down in float64 with transformers and torch."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from forge.data_models import Completion, TrainInputs, TrainTargets
from forge.rl.loss import OffPolicyCorrection, PPOLoss, SFTLoss
from forge.rl.minibatches import Update, reads_proximal, update_order, updates
from tests.integration.trainer_cases import WeightedLogprobs, batch_of, completion_groups, start_trainer

LR, MAX_NORM, CLIP = 3e-4, 1.0, 0.2
EPOCHS, SEED, STEP = 2, 5, 3


class Direct:
    """A trainer of this process, called as one in another is."""

    def __init__(self, actor: object) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(route=getattr(self._actor, name))


def minibatches() -> list[list[list[Completion]]]:
    """Two of groups; the generator's log-probabilities are somewhat off."""
    made = [
        completion_groups(seed=1, lengths=((6, 9), (7,))),
        completion_groups(seed=2, lengths=((4, 8, 5),)),
    ]
    generator = torch.Generator().manual_seed(0)
    model_like = [
        dataclasses.replace(c, logprobs=-5.5 + torch.randn(len(c.token_ids), generator=generator))
        for groups in made
        for group in groups
        for c in group
    ]
    rest = iter(model_like)
    return [[[next(rest) for _ in group] for group in groups] for groups in made]


def packed(groups: list[list[Completion]]) -> tuple[TrainInputs, TrainTargets]:
    inputs, targets = batch_of(groups)
    number = torch.arange(len(targets.advantages))
    return inputs, dataclasses.replace(targets, advantages=2.0 * torch.cos(3.0 * number))


def train(folder: Path, loss: PPOLoss, batches: Sequence[tuple[TrainInputs, TrainTargets]]) -> list[Update]:
    async def main() -> list[Update]:
        trainer = await start_trainer(
            folder, loss, optimizer={"lr": LR, "eps": 1e-3}, training={"max_grad_norm": MAX_NORM}
        )
        given = [([inputs], [targets]) for inputs, targets in batches]
        return await updates(Direct(trainer), given, epochs=EPOCHS, seed=SEED, step=STEP, loss=loss)  # type: ignore[arg-type]

    return asyncio.run(main())


def plainly(folder: Path, order: Sequence[int], cap: float) -> list[dict[str, float]]:
    """AReaL's decoupled objective (arXiv 2505.24298, eq. 5), its behaviour weight capped, one sequence at a
    time: E[min(prox / behaviour, cap) * min(u A, clip(u) A)] with u = pi / prox."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, eps=1e-3)
    data = [[c for group in groups for c in group] for groups in minibatches()]
    advantages = [packed(groups)[1].advantages.double() for groups in minibatches()]
    with torch.no_grad():
        proximal = [[logprobs(model, c) for c in completions] for completions in data]
    seen: list[dict[str, float]] = []
    for number in order:
        terms, ratios, weights = [], [], []
        for c, advantage, prox in zip(data[number], advantages[number], proximal[number], strict=True):
            weight = (prox - c.logprobs.double()).exp().clamp(max=cap)
            ratio = (logprobs(model, c) - prox).exp()
            objective = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            terms.append(-weight * objective)
            ratios.append(ratio.detach())
            weights.append(weight)
        ratio, loss = torch.cat(ratios), torch.cat(terms).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        clipped = ((ratio - 1).abs() > CLIP).double().mean()
        told = {"loss": loss, "grad_norm": norm, "ratio_mean": ratio.mean(), "clip_frac": clipped}
        told |= {"ratio_max": ratio.max(), "correction_mean": torch.cat(weights).mean()}
        seen.append({name: float(value.detach()) for name, value in told.items()})
    return seen


def logprobs(model: Any, c: Completion) -> Tensor:
    assert c.prompt_ids is not None
    log_p = torch.log_softmax(
        model(torch.cat([c.prompt_ids, c.token_ids])[None]).logits[0] / c.temperature, -1
    )
    return log_p[len(c.prompt_ids) - 1 : -1].gather(-1, c.token_ids[:, None])[:, 0]


def test_two_epochs_of_two_minibatches_are_those_of_decoupled_ppo(tiny_llama: Path) -> None:
    cap = 3.0
    loss = PPOLoss(clip_low=CLIP, clip_high=CLIP, correction=OffPolicyCorrection("truncate", cap=cap))
    done = train(tiny_llama, loss, [packed(groups) for groups in minibatches()])
    order = update_order(2, EPOCHS, seed=SEED, step=STEP)
    assert [update.minibatch for update in done] == order
    wanted = plainly(tiny_llama, order, cap)
    for update, want in zip(done, wanted, strict=True):
        got = {"loss": update.result.loss, **update.result.metrics}
        assert {name: got[name] for name in want} == pytest.approx(want, rel=2e-3, abs=2e-5)
    first = done[0].result.metrics
    assert (first["ratio_mean"], first["ratio_max"], first["clip_frac"]) == (1.0, 1.0, 0.0)  # to the bit
    assert 0 < wanted[-1]["clip_frac"] < 1 and wanted[1]["ratio_max"] > 1.01


def test_the_order_is_that_of_seed_and_step() -> None:
    orders = {
        tuple(update_order(4, 2, seed=seed, step=step))
        for seed in range(3)
        for step in range(3)
        for _ in "ab"
    }
    assert len(orders) == 9
    for order in orders:
        assert sorted(order[:4]) == sorted(order[4:]) == [0, 1, 2, 3]


class OfSixArguments(torch.nn.Module):
    """A loss whose call, a module's, seems to take anything."""

    def forward(self, logits: Tensor, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return logits.sum(), {}


def test_losses_that_read_no_proximal_policy_are_not_given_one() -> None:
    assert not reads_proximal(WeightedLogprobs()) and not reads_proximal(PPOLoss())
    assert reads_proximal(PPOLoss(correction=OffPolicyCorrection("decoupled"))) and reads_proximal(SFTLoss())
    assert reads_proximal(lambda *args, proximal_logprobs=None: args[0])
    assert not reads_proximal(OfSixArguments())
