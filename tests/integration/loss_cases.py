"""Losses that are computed under every layout and by transformers in one process, and what they are given."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forge.data_models import Completion, TrainTargets
from forge.rl.loss.correction import OffPolicyCorrection
from forge.rl.loss.dapo import DAPOLoss
from forge.rl.loss.gspo import GSPOLoss

KL_TARGET = 0.01
FIRST_BETA = 0.1


def own_loss(
    logits: Tensor,
    target_ids: Tensor,
    advantages: Tensor,
    generator_logprobs: Tensor,
    loss_mask: Tensor,
    ref_logprobs: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A user's own, of six arguments: a mean over sequences; reads more of the logits than targets."""
    assert ref_logprobs is not None
    log_p = torch.log_softmax(logits, -1)
    logprobs = log_p.gather(-1, target_ids[..., None])[..., 0]
    second = log_p.topk(2, -1).values[..., 1]
    terms = (
        -advantages * (logprobs - generator_logprobs).exp() + 0.1 * second - 0.05 * ref_logprobs * logprobs
    )
    return (terms * loss_mask).sum() / loss_mask.any(-1).sum(), {}


def losses() -> dict[str, Any]:
    """By name; fresh ones, as some have a state. Clips are so wide that none stands on an edge."""
    wide: dict[str, Any] = {"clip_low": 0.95, "clip_high": 20.0}
    return {
        "own": own_loss,
        "gspo": GSPOLoss(**wide, entropy_coef=0.01),
        "gspo by tokens": GSPOLoss(
            **wide, level="token", correction=OffPolicyCorrection("truncate", cap=1.2)
        ),
        "dapo": DAPOLoss(clip_range=0.95, adaptive_kl=True, kl_target=KL_TARGET),
    }


def with_extras(targets: TrainTargets, first: Tensor) -> TrainTargets:
    """Advantages of each token, reference and proximal policy: of a sequence's number, which `first` [N] is a
    function of, and the token's place."""
    columns = torch.arange(targets.target_ids.shape[1])
    values = first[:, None] * torch.cos(0.5 * columns)
    return dataclasses.replace(
        targets,
        advantages=values,
        ref_logprobs=targets.generator_logprobs - 0.3 * values,
        proximal_logprobs=targets.generator_logprobs + 0.2 * values,
    )


def without_proximal(targets: Sequence[TrainTargets]) -> list[TrainTargets]:
    """For losses of six arguments."""
    return [dataclasses.replace(t, proximal_logprobs=None) for t in targets]


def plain_loss(
    model: PreTrainedModel, completions: Sequence[Completion], advantages: Tensor, loss: Any
) -> tuple[float, float, dict[str, float]]:
    """Loss, norm of its gradient, metrics: all logits by transformers, padded, and one call of the loss."""
    length = max(len(c.token_ids) for c in completions)
    rows: list[Tensor] = []
    for c in completions:
        assert c.prompt_ids is not None
        tokens = torch.cat([c.prompt_ids, c.token_ids])[None]
        logits = model(tokens[:, :-1]).logits[0, len(c.prompt_ids) - 1 :] / c.temperature
        rows.append(torch.nn.functional.pad(logits, (0, 0, 0, length - len(logits))))
    padded = [torch.nn.utils.rnn.pad_sequence(values, batch_first=True) for values in (
        [c.token_ids for c in completions],
        [c.logprobs for c in completions],
        [torch.ones(len(c.token_ids), dtype=torch.bool) for c in completions],
    )]  # fmt: skip
    target_ids, generator_logprobs, mask = padded
    bare = TrainTargets(target_ids * 0, target_ids, mask, advantages, generator_logprobs)
    targets = with_extras(bare, advantages)
    more = {} if loss is own_loss else {"proximal_logprobs": targets.proximal_logprobs}
    given = (targets.advantages, generator_logprobs, mask, targets.ref_logprobs)
    value, metrics = loss(torch.stack(rows), target_ids, *given, **more)
    gradients = torch.autograd.grad(value, list(model.parameters()))
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    whole = getattr(loss, "whole_batch_metrics", dict)({name: float(n) for name, n in metrics.items()})
    return float(value.detach()), float(norm), whole
