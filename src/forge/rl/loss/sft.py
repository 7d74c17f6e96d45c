"""Supervised fine-tuning: the negative log-likelihood of the target tokens."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from forge.rl.loss.ops import aggregate, masked, per_token
from forge.rl.loss.token_loss import TokenLoss


@dataclass(frozen=True, slots=True)
class SFTLoss(TokenLoss):
    """Mean over all target tokens of -w log p(token), in nats: cross-entropy with a weight w for each target,
    which stands where other losses have their advantages (1 in plain text). The divisor is the number of
    targets, whatever their weights, so that neither micro-batches nor ranks change the gradient.
    """

    @property
    def normalize_by(self) -> Literal["tokens"]:
        """What the loss averages over: a trainer weighs micro-batches by it."""
        return "tokens"

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
        """See TokenLoss: advantages are the weights, the other policies' log-probabilities are not read.
        Metrics: nll and entropy."""
        weights, nll = masked(per_token(advantages, logprobs), loss_mask), -masked(logprobs, loss_mask)
        facts = {"nll": nll.detach(), "entropy": entropy.detach()}
        metrics = {name: aggregate(fact, loss_mask, "token_mean") for name, fact in facts.items()}
        return aggregate(weights * nll, loss_mask, "token_mean"), metrics
