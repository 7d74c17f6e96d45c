"""What all policy-gradient losses share: each says only what it makes of ratios and advantages."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from forge.errors import ConfigError
from forge.rl.kl import next_coefficient
from forge.rl.loss.correction import OffPolicyCorrection
from forge.rl.loss.ops import AggType, KLKind, aggregate, compute_kl, compute_ratio, masked, per_token
from forge.rl.loss.settings import require, require_choices, require_finite
from forge.rl.loss.token_loss import TokenLoss

_IMPORTANCE = ("importance_mean", "importance_square_mean")
"""Metrics of parts of a batch that `ess` is made of."""


@dataclass(slots=True, kw_only=True)
class PolicyLoss(TokenLoss):
    """aggregate(weight * surrogate) + beta * aggregate(KL(pi || ref)) - entropy_coef * aggregate(H(pi)).

    A loss is a subclass with its own `surrogate`. The weight is 1, or that of `correction`. With `kl_target`
    beta is a state: it follows the measured KL (see `after_step`), and must start above 0.
    """

    # Metrics that are means over the tokens of a batch, whatever the loss is averaged over.
    token_means: ClassVar[frozenset[str]] = frozenset(
        ("kl", "entropy", "ratio_mean", "clip_frac", "logprob_gap", "correction_mean", "correction_frac")
    ).union(_IMPORTANCE)

    beta: float = 0.0  # weight of the KL term, per nat
    kl_kind: KLKind = "k3"  # its estimator; k1 tells the KL, but its gradient is 0 on average
    kl_target: float | None = None  # KL in nats per token that beta is steered to; None: beta stays
    entropy_coef: float = 0.0  # weight of the entropy bonus, per nat
    agg_type: AggType = "token_mean"  # how tokens are averaged, see `ops.aggregate`
    horizon: int | None = None  # divisor of "fixed_horizon" in tokens, best the longest completion allowed
    correction: OffPolicyCorrection | None = None  # for a trainer that is not the policy that sampled

    def __post_init__(self) -> None:
        """Raises ConfigError, beginning with the name of the field, for what can't be."""
        require_choices(self)
        require_finite(self, "beta", "kl_target", "entropy_coef")
        require(self, "beta", self.beta >= 0, "not be negative")
        require(self, "horizon", self.horizon is None or self.horizon >= 1, "be at least 1")
        if self.kl_target is not None:
            require(self, "kl_target", self.kl_target > 0, "be above 0")
            require(self, "beta", self.beta > 0, "start above 0 to follow kl_target, e.g. at 0.1")

    @abstractmethod
    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Terms to minimise [N, T], whose gradient is that of the policy, and facts [N, T] about the tokens,
        whose means become metrics. All arguments are [N, T] float32, 0 where masked; only logprobs has a
        gradient. What is returned for masked tokens is not read. (A loss with facts of its own adds their
        names to `token_means`.)
        """

    def ratio(self, logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
        """pi / pi_old [N, T] as the surrogate takes it: of each token, unless a subclass says otherwise."""
        return compute_ratio(logprobs, old_logprobs, loss_mask)

    @property
    def normalize_by(self) -> Literal["sequences", "tokens"]:
        """What the loss averages over: a trainer weighs micro-batches by it."""
        return "tokens" if self.agg_type == "token_mean" else "sequences"

    def from_logprobs(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        advantages: Tensor,
        generator_logprobs: Tensor,
        loss_mask: Tensor,
        ref_logprobs: Tensor | None = None,
        proximal_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See TokenLoss. Raises ConfigError when beta is above 0 and there are no ref_logprobs.

        Metrics: policy (the surrogate), kl, entropy, ratio_mean and ratio_max (pi / old policy), logprob_gap
        (mean |log pi - log pi_generator|), importance_mean and importance_square_mean (pi / pi_generator, and
        its square: see `whole_batch_metrics`), clip_frac where the loss clips; beta when it is adaptive;
        correction_mean and correction_frac with a correction.
        """
        if self.beta > 0 and ref_logprobs is None:
            raise ConfigError(
                f"beta is {self.beta}, but there are no reference log-probabilities: set it to 0"
            )
        given = (logprobs, entropy, per_token(advantages, logprobs), generator_logprobs)
        logprobs, entropy, advantages, generator_logprobs = (masked(values, loss_mask) for values in given)
        now = logprobs.detach()
        old, weight, facts = self._old_policy(now, generator_logprobs, proximal_logprobs, loss_mask)
        terms, told = self.surrogate(logprobs, old, advantages, loss_mask)
        ratio, gap = self.ratio(now, old, loss_mask), (now - generator_logprobs).abs()
        facts |= told | {"ratio_mean": ratio, "logprob_gap": gap, "entropy": entropy}
        importance = compute_ratio(now, generator_logprobs, loss_mask)
        facts |= dict(zip(_IMPORTANCE, (importance, importance.square()), strict=True))
        loss = policy = self._aggregate(weight * terms, loss_mask)
        if ref_logprobs is not None:
            facts["kl"] = compute_kl(logprobs, ref_logprobs, loss_mask, self.kl_kind)
        if self.beta > 0:
            loss = loss + self.beta * self._aggregate(facts["kl"], loss_mask)
        if self.entropy_coef != 0:
            loss = loss - self.entropy_coef * self._aggregate(entropy, loss_mask)
        metrics = {name: aggregate(fact.detach(), loss_mask, "token_mean") for name, fact in facts.items()}
        metrics |= {"policy": policy.detach(), "ratio_max": masked(ratio, loss_mask).max()}
        if self.kl_target is not None:
            metrics["beta"] = torch.full_like(metrics["policy"], self.beta)
        return loss, metrics

    def terms(
        self,
        logprobs: Tensor,
        advantages: Tensor,
        generator_logprobs: Tensor,
        loss_mask: Tensor,
        ref_logprobs: Tensor | None = None,
        proximal_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Of each token [N, T], 0 where masked: the ratio that the surrogate is of, and the term that the
        loss is an average of, KL included, without the entropy bonus. To look at: arguments as in
        `from_logprobs`."""
        given = (logprobs, per_token(advantages, logprobs), generator_logprobs)
        logprobs, advantages, generator_logprobs = (masked(values, loss_mask) for values in given)
        old, weight, _ = self._old_policy(logprobs, generator_logprobs, proximal_logprobs, loss_mask)
        terms, _ = self.surrogate(logprobs, old, advantages, loss_mask)
        terms = weight * terms
        if self.beta > 0 and ref_logprobs is not None:
            terms = terms + self.beta * compute_kl(logprobs, ref_logprobs, loss_mask, self.kl_kind)
        ratio = self.ratio(logprobs, old, loss_mask)
        return masked(ratio, loss_mask), masked(terms, loss_mask)

    def _old_policy(
        self, now: Tensor, generator_logprobs: Tensor, proximal_logprobs: Tensor | None, loss_mask: Tensor
    ) -> tuple[Tensor, Tensor | float, dict[str, Tensor]]:
        """What the ratio is over, what the terms weigh, and facts about the weights."""
        if self.correction is None:
            return generator_logprobs, 1.0, {}
        old = now if proximal_logprobs is None else masked(proximal_logprobs, loss_mask)
        return old, *self.correction.weights(old, generator_logprobs, loss_mask)

    def _aggregate(self, values: Tensor, loss_mask: Tensor) -> Tensor:
        return aggregate(values, loss_mask, self.agg_type, self.horizon)

    def whole_batch_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Those of a whole batch, with ess in the place of the two means of importance weights.

        ess: the effective sample size as a share of the tokens, (sum w)^2 / (n sum w^2) of w = pi /
        pi_generator (Kish, 1965): 1 when both policies are one, 1/n when one token outweighs all others.
        """
        rest = dict(metrics)
        mean, square = (rest.pop(name, None) for name in _IMPORTANCE)
        if mean is None or square is None:  # a subclass has its own metrics
            return rest
        return rest | {"ess": mean**2 / square if square != 0 else 0.0}

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """To be called after each update with the metrics of its whole batch, the same on all ranks.

        With `kl_target` beta answers to the KL that was measured (arXiv 1909.08593, sec. 2.2).
        """
        if self.kl_target is not None:
            self.beta = next_coefficient(self.beta, metrics["kl"], self.kl_target)

    def state_dict(self) -> dict[str, Any]:
        """What `after_step` changes. A beta that does not follow a target is a setting, and no state."""
        return {} if self.kl_target is None else {"beta": self.beta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there; a beta that is a setting now stays as it was set."""
        if self.kl_target is not None:
            self.beta = state.get("beta", self.beta)
