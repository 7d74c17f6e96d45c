"""forge's half of losses_vs_trl: values and gradients, and ours with one thing made as TRL has it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from forge.rl.advantage import EPS, estimate, whiten
from forge.rl.loss import PPOLoss
from forge.rl.loss.ops import aggregate, compute_entropy, compute_kl, compute_logprobs, compute_ratio, masked
from forge.rl.loss.registry import make_loss
from forge.rl.shaping import KLReward

LENGTH, GROUP_SIZE = 12, 4  # tokens of the longest completion; completions of a prompt
Batch = dict[str, Any]
Result = Mapping[str, Tensor]

BETA, ENTROPY_COEF = 0.04, 0.01
GRPO: dict[str, Any] = {
    "name": "grpo",
    "beta": 0.0,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "agg_type": "sequence_mean",
}
"""Settings of the paper's GRPO without a reference."""


def op(function: Callable[[Tensor, Batch], Tensor]) -> Callable[[Batch], Result]:
    """The values of a function of logits, and the gradient of their sum weighted by other numbers."""

    def compute(batch: Batch) -> Result:
        logits = batch["logits"].clone().requires_grad_()
        value = function(logits, batch)
        [gradient] = torch.autograd.grad((value * batch["old_logprobs"]).sum(), logits)
        return {"value": value.detach(), "gradient": gradient}

    return compute


def groups(batch: Batch) -> list[list[float]]:
    """The rewards of each prompt's completions."""
    return batch["rewards"].view(-1, GROUP_SIZE).tolist()


def advantages(batch: Batch, **how: Any) -> Result:
    """Ours of all groups [N], by `estimate`."""
    return {"advantages": torch.tensor([a for group in groups(batch) for a in estimate(group, **how)])}


def whitened(batch: Batch, **how: Any) -> Result:
    """Ours of a batch [N], by `estimate`, then `whiten`."""
    return {"advantages": torch.tensor(whiten(advantages(batch, **how)["advantages"].tolist()))}


def penalised(batch: Batch, beta: float) -> Result:
    """Leave-one-out advantages [N] of rewards with the KL taken off."""
    shape = KLReward(beta)
    rows = zip(
        batch["rewards"], batch["old_logprobs"], batch["ref_logprobs"], batch["loss_mask"], strict=True
    )
    rewards = [shape(r.item(), old[mask], ref[mask]) for r, old, ref, mask in rows]
    return advantages({**batch, "rewards": torch.tensor(rewards)}, baseline="leave_one_out", normalize="none")


def by_sample_std(batch: Batch, ours: Result) -> Result:
    rewards = torch.tensor(groups(batch))
    scale = (rewards.std(1, correction=0) + EPS) / (rewards.std(1) + EPS)
    return {"advantages": ours["advantages"] * scale.repeat_interleave(GROUP_SIZE)}


def by_std_of_rewards(batch: Batch, ours: Result) -> Result:
    centred = advantages(batch, normalize="none")["advantages"]
    return {"advantages": centred / (batch["rewards"].std() + EPS)}


def by_sample_std_of_batch(batch: Batch, ours: Result) -> Result:
    values = advantages(batch, baseline="leave_one_out", normalize="none")["advantages"]
    return {"advantages": (values - values.mean()) / (values.std() + EPS)}


def with_empty_sequences(batch: Batch, ours: Result) -> Result:
    share = batch["loss_mask"].any(-1).float().mean()
    return {name: value * share for name, value in ours.items()}


def with_ratio_on_kl(batch: Batch, ours: Result) -> Result:
    def value(logits: Tensor, batch: Batch) -> Tensor:
        policy, _ = make_loss(GRPO)(*loss_arguments(logits, batch))
        logprobs, mask = compute_logprobs(logits, batch["ids"]), batch["loss_mask"]
        kl = compute_kl(logprobs, batch["ref_logprobs"], mask)
        ratio = compute_ratio(logprobs, batch["old_logprobs"], mask)
        return policy + BETA * aggregate(ratio * kl, mask, "sequence_mean")

    return gradient_of(value, batch)


def with_entropy_of_tokens(batch: Batch, ours: Result) -> Result:
    def value(logits: Tensor, batch: Batch) -> Tensor:
        policy, _ = make_loss(GRPO)(*loss_arguments(logits, batch))
        bonus = aggregate(compute_entropy(logits), batch["loss_mask"], "token_mean")
        return policy - ENTROPY_COEF * bonus

    return gradient_of(value, batch)


def with_sequences_as_actions(batch: Batch, ours: Result) -> Result:
    def value(logits: Tensor, batch: Batch) -> Tensor:
        mask = batch["loss_mask"]
        logprobs = compute_logprobs(logits, batch["ids"])
        now, old = (masked(x, mask).sum(-1, keepdim=True) for x in (logprobs, batch["old_logprobs"]))
        whole = torch.ones_like(now, dtype=torch.bool)
        return PPOLoss().from_logprobs(now, now.detach(), batch["advantages"], old, whole)[0]

    return gradient_of(value, batch)


def loss_arguments(logits: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    """Of a loss without a correction: the policy that sampled is the one that the update began with."""
    names = ("ids", "advantages", "old_logprobs", "loss_mask", "ref_logprobs")
    return (logits, *(batch[name] for name in names))


def gradient_of(value: Callable[[Tensor, Batch], Tensor], batch: Batch) -> Result:
    """A scalar function of the logits, and its gradient."""
    logits = batch["logits"].clone().requires_grad_()
    result = value(logits, batch)
    [gradient] = torch.autograd.grad(result, logits)
    return {"value": result.detach(), "gradient": gradient}
