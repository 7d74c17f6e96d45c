"""The same training by transformers and torch alone: one process, one sequence at a time, own formulas."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, PreTrainedModel

from forge.data_models import Completion

OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
MAX_GRAD_NORM = 1.0
STEPS = 5
SCHEDULE = {"warmup_steps": 2, "decay": "cosine", "min_lr_factor": 0.1}
# two steps of warm-up, one at the full rate, then down a cosine, which would reach 0.1 after one more step
LR_FACTORS = [0.5, 1.0, 1.0, *(0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2 for share in (1 / 3, 2 / 3))]


@dataclass(frozen=True, slots=True)
class PlainRun:
    """What a run saw and what it led to."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    model: PreTrainedModel


def train_plainly(
    folder: Path,
    completions: Sequence[Completion],
    advantages: Tensor,
    *,
    by_tokens: bool,
    lora: Mapping[str, Any] | None = None,
) -> PlainRun:
    """AdamW on - advantage * log-probability, summed over a sequence, as a mean over sequences or tokens; of
    adapters of this rank and alpha on all layers, or of all weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    trained = list(model.parameters())
    if lora is not None:
        trained = [
            *add_low_rank(model, first_factors(model, lora["rank"]), lora["alpha"] / lora["rank"]).values()
        ]
    optimizer = torch.optim.AdamW(trained, **OPTIMIZER)
    size = sum(len(c.token_ids) for c in completions) if by_tokens else len(completions)
    losses, grad_norms = [], []
    for factor in LR_FACTORS:
        optimizer.param_groups[0]["lr"] = OPTIMIZER["lr"] * factor
        optimizer.zero_grad()
        pairs = zip(completions, advantages.tolist(), strict=True)
        loss = sum(-advantage * plain_logprobs(model, c).sum() for c, advantage in pairs) / size
        loss.backward()
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)))
        optimizer.step()
        losses.append(float(loss.detach()))
    for module in model.modules():
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")  # leaves it merged
    return PlainRun(losses, grad_norms, {n: p.detach() for n, p in model.named_parameters()}, model)


class LowRank(nn.Module):
    """W -> W + scale * B A."""

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Parameter(a), nn.Parameter(b), scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * self.b @ self.a


def add_low_rank(model: nn.Module, first: Mapping[str, Tensor], scale: float) -> dict[str, nn.Parameter]:
    """Freezes a model and adds factors of these first values, by their names in PEFT, which are returned."""
    model.requires_grad_(False)
    factors: dict[str, nn.Parameter] = {}
    for name in [name for name in first if ".lora_A." in name]:
        other = name.replace(".lora_A.", ".lora_B.")
        low_rank = LowRank(first[name].clone(), first[other].clone(), scale)
        layer = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        parametrize.register_parametrization(layer, "weight", low_rank)
        factors |= {name: low_rank.a, other: low_rank.b}
    return factors


def first_factors(model: nn.Module, rank: int, seed: int = 0) -> dict[str, Tensor]:
    """What a trainer draws for all linear layers but the head."""
    first: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            stem, (num_out, num_in) = f"base_model.model.{name}", layer.weight.shape
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {stem}.lora_A.weight".encode()))
            a = torch.empty(rank, num_in).uniform_(-(num_in**-0.5), num_in**-0.5, generator=generator)
            first |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": torch.zeros(num_out, rank)}
    return first


def plain_logprobs(model: PreTrainedModel, completion: Completion) -> Tensor:
    """[T] of a completion's tokens at its temperature."""
    assert completion.prompt_ids is not None
    tokens = torch.cat([completion.prompt_ids, completion.token_ids])[None]
    logits = model(tokens[:, :-1]).logits[0, len(completion.prompt_ids) - 1 :] / completion.temperature
    return torch.log_softmax(logits, -1).gather(-1, completion.token_ids[:, None])[:, 0]
