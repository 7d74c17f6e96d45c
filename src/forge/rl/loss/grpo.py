"""GRPO: a clipped policy gradient over groups, with a KL term towards a reference (arXiv 2402.03300)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from forge.errors import ConfigError
from forge.rl.loss.ops import AggType, aggregate, compute_entropy, compute_kl, compute_logprobs, compute_ratio


@dataclass(frozen=True, slots=True)
class GRPOLoss:
    """Group relative policy optimisation, eq. 3 of arXiv 2402.03300.

    Per token, with r = pi / pi_generator and advantage A:
    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta * KL(pi || ref) - entropy_coef * H(pi).
    `clip_high > clip_low` is DAPO's clip-higher (arXiv 2503.14476, eq. 10). `agg_type` says how tokens are
    averaged (see `ops.aggregate`), `horizon` is the divisor of "fixed_horizon" in tokens, best the longest
    completion allowed, so that it does not depend on the batch.
    """

    # What the trainer weighs by tokens, even where the loss is a mean over sequences.
    token_means: ClassVar[frozenset[str]] = frozenset(
        ("kl", "entropy", "ratio_mean", "clip_frac", "logprob_gap")
    )

    clip_low: float = 0.2
    clip_high: float = 0.28
    beta: float = 0.1
    agg_type: AggType = "fixed_horizon"
    horizon: int | None = None
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ConfigError(f"grpo.clip_low must lie in [0, 1], got {self.clip_low}")
        if self.clip_high < 0 or self.beta < 0:
            raise ConfigError(
                f"grpo.clip_high and grpo.beta must not be negative, got {self.clip_high} and {self.beta}"
            )

    # Makes the trainer weigh micro-batches by what this loss averages over.
    @property
    def normalize_by(self) -> Literal["sequences", "tokens"]:
        return "tokens" if self.agg_type == "token_mean" else "sequences"

    def __call__(
        self,
        logits: Tensor,
        target_ids: Tensor,
        advantages: Tensor,
        generator_logprobs: Tensor,
        loss_mask: Tensor,
        ref_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """logits [N, T, V]; target_ids, generator_logprobs, loss_mask, ref_logprobs [N, T]; advantages [N]
        or [N, T]. Returns the loss (a scalar) and its parts, detached."""
        logprobs = compute_logprobs(logits, target_ids)
        with torch.set_grad_enabled(self.entropy_coef != 0 and torch.is_grad_enabled()):
            entropy = compute_entropy(logits)
        return self.from_logprobs(logprobs, entropy, advantages, generator_logprobs, loss_mask, ref_logprobs)

    def from_logprobs(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        advantages: Tensor,
        generator_logprobs: Tensor,
        loss_mask: Tensor,
        ref_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The same from the targets' log-probabilities and the entropies [N, T]: no logits need be kept."""
        if self.beta > 0 and ref_logprobs is None:
            raise ConfigError(
                f"grpo.beta is {self.beta}, but there are no reference log-probabilities: set it to 0"
            )
        advantages = advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages
        ratio = compute_ratio(logprobs, generator_logprobs, loss_mask)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        policy = self._aggregate(-torch.minimum(ratio * advantages, clipped * advantages), loss_mask)
        loss = policy
        metrics = {"policy": policy.detach()}
        if ref_logprobs is not None:
            kl = compute_kl(logprobs, ref_logprobs, loss_mask)
            metrics["kl"] = aggregate(kl.detach(), loss_mask, "token_mean")
            if self.beta > 0:
                loss = loss + self.beta * self._aggregate(kl, loss_mask)
        if self.entropy_coef != 0:
            loss = loss - self.entropy_coef * self._aggregate(entropy, loss_mask)
        with torch.no_grad():
            gap = (logprobs - generator_logprobs).abs()
            metrics["entropy"] = aggregate(entropy, loss_mask, "token_mean")
            metrics["ratio_mean"] = aggregate(ratio, loss_mask, "token_mean")
            metrics["ratio_max"] = ratio.max()
            metrics["clip_frac"] = aggregate((clipped != ratio).float(), loss_mask, "token_mean")
            metrics["logprob_gap"] = aggregate(gap, loss_mask, "token_mean")
        return loss, metrics

    def _aggregate(self, values: Tensor, loss_mask: Tensor) -> Tensor:
        return aggregate(values, loss_mask, self.agg_type, self.horizon)
