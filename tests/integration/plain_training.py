"""The same training by transformers and torch alone: one process, one sequence at a time, own formulas."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
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
    folder: Path, completions: Sequence[Completion], advantages: Tensor, *, by_tokens: bool
) -> PlainRun:
    """AdamW on - advantage * log-probability, summed over a sequence, as a mean over sequences or tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    size = sum(len(c.token_ids) for c in completions) if by_tokens else len(completions)
    losses, grad_norms = [], []
    for factor in LR_FACTORS:
        optimizer.param_groups[0]["lr"] = OPTIMIZER["lr"] * factor
        optimizer.zero_grad()
        pairs = zip(completions, advantages.tolist(), strict=True)
        loss = sum(-advantage * plain_logprobs(model, c).sum() for c, advantage in pairs) / size
        loss.backward()
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return PlainRun(losses, grad_norms, {n: p.detach() for n, p in model.named_parameters()}, model)


def plain_logprobs(model: PreTrainedModel, completion: Completion) -> Tensor:
    """[T] of a completion's tokens at its temperature."""
    assert completion.prompt_ids is not None
    tokens = torch.cat([completion.prompt_ids, completion.token_ids])[None]
    logits = model(tokens[:, :-1]).logits[0, len(completion.prompt_ids) - 1 :] / completion.temperature
    return torch.log_softmax(logits, -1).gather(-1, completion.token_ids[:, None])[:, 0]
