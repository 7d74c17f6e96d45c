"""Supervised fine-tuning: the negative log-likelihood of the target tokens."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from forge.rl.loss.ops import aggregate, compute_entropy, compute_logprobs


@dataclass(frozen=True, slots=True)
class SFTLoss:
    """Mean over all target tokens of -w log p(token), in nats: cross-entropy with a weight w for each target,
    which stands where other losses have their advantages (1 in plain text). The divisor is the number of
    targets, whatever their weights, so that neither micro-batches nor ranks change the gradient.
    """

    # Makes the trainer weigh micro-batches by what this loss averages over.
    @property
    def normalize_by(self) -> Literal["tokens"]:
        return "tokens"

    def __call__(
        self,
        logits: Tensor,
        target_ids: Tensor,
        advantages: Tensor,
        generator_logprobs: Tensor,
        loss_mask: Tensor,
        ref_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """logits [N, T, V]; target_ids, loss_mask [N, T]; advantages: weights [N] or [N, T]; the rest is not
        read. Returns the loss (a scalar) and its parts, detached."""
        logprobs = compute_logprobs(logits, target_ids)
        entropy = compute_entropy(logits.detach())
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
        weights = advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages
        loss = aggregate(-weights * logprobs, loss_mask, "token_mean")
        return loss, {
            "nll": aggregate(-logprobs.detach(), loss_mask, "token_mean"),
            "entropy": aggregate(entropy.detach(), loss_mask, "token_mean"),
        }
