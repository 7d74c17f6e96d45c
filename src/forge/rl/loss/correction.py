"""Corrections for tokens that another policy sampled than the one that the update starts from."""

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from forge.rl.loss.ops import MAX_LOG_RATIO, masked
from forge.rl.loss.settings import require, require_choices

OWN_BOUNDS = {"decoupled": (), "truncate": ("cap",), "mask": ("low", "high")}


@dataclass(frozen=True, slots=True)
class OffPolicyCorrection:
    """Separates the two things that pi / pi_generator is the product of.

    The loss takes its ratio, and clips it, against the proximal policy: the trainer's own when the first
    update on the batch began (decoupled PPO: Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298). The
    rest, rho = pi_proximal / pi_generator, comes of older weights, and of an engine that computes otherwise;
    it weighs the token's term, without a gradient of its own:

    - decoupled: rho
    - truncate: min(rho, cap) (truncated importance sampling, TIS: Yao et al., 2025, "Your efficient RL
      framework secretly brings you off-policy RL training")
    - mask: rho if low <= rho <= high, else 0 (IcePop: Ring-1T, arXiv 2510.18855, with its bounds 0.5 and 5)

    With a single update on each batch the proximal policy is the one that is trained: the loss's ratio is 1,
    its clips cut nothing, and these weights are all that is left of importance sampling.

    level: rho of each token, or of the whole sequence: the product over its tokens.
    """

    kind: Literal["decoupled", "truncate", "mask"]
    cap: float = 2.0
    low: float = 0.5
    high: float = 5.0
    level: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        """Raises ConfigError, beginning with the name of the field, for what can't be."""
        require_choices(self)
        require(self, "cap", self.cap > 0, "be above 0")
        require(self, "low", 0 <= self.low <= 1, "lie in [0, 1]")
        require(self, "high", self.high >= 1, "be at least 1")
        own = OWN_BOUNDS[self.kind]
        for bound in fields(self):
            if bound.name in {"cap", "low", "high"}.difference(own):
                what = (
                    f"be left out, or at {bound.default}: {self.kind} has {' and '.join(own) or 'no bounds'}"
                )
                require(self, bound.name, getattr(self, bound.name) == bound.default, what)

    def weights(
        self, proximal_logprobs: Tensor, generator_logprobs: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[N, T] each -> each token's weight [N, T], and what became of it: facts [N, T] for the metrics
        correction_mean, the mean weight, and correction_frac, the share of tokens cut to a bound or to 0."""
        log_rho = (masked(proximal_logprobs, loss_mask) - masked(generator_logprobs, loss_mask)).detach()
        if self.level == "sequence":
            log_rho = log_rho.sum(-1, keepdim=True).expand_as(log_rho)
        rho = torch.exp(log_rho.clamp(max=MAX_LOG_RATIO))
        if self.kind == "truncate":
            weight = rho.clamp(max=self.cap)
        elif self.kind == "mask":
            weight = torch.where((rho >= self.low) & (rho <= self.high), rho, 0.0)
        else:
            weight = rho
        return weight, {"correction_mean": weight, "correction_frac": weight != rho}
