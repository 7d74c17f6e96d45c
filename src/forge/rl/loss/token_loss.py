"""What all losses have in common that read of the logits only how likely each target was."""

from abc import ABC, abstractmethod

from torch import Tensor

from forge.rl.loss.ops import compute_logprobs_and_entropy


class TokenLoss(ABC):
    """A loss of the targets' log-probabilities and the entropies there.

    Called with logits it computes both first; a trainer calls `from_logprobs` at once, and keeps no logits.
    """

    __slots__ = ()

    def __call__(
        self,
        logits: Tensor,
        target_ids: Tensor,
        advantages: Tensor,
        generator_logprobs: Tensor,
        loss_mask: Tensor,
        ref_logprobs: Tensor | None = None,
        proximal_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """logits [N, T, V], divided by the temperature of the sampling; the rest as in `from_logprobs`, with
        target_ids [N, T]. Returns the loss, a scalar, and its metrics, detached."""
        scores = compute_logprobs_and_entropy(logits, target_ids, loss_mask=loss_mask)
        rest = (advantages, generator_logprobs, loss_mask, ref_logprobs)
        if proximal_logprobs is None:  # a subclass that does not read it need not have the argument
            return self.from_logprobs(*scores, *rest)
        return self.from_logprobs(*scores, *rest, proximal_logprobs=proximal_logprobs)

    @abstractmethod
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
        """All [N, T] (loss_mask bool), in nats, advantages [N] or [N, T]; masked places may hold anything.

        logprobs, entropy: of the policy in training. generator_logprobs: of the policy that sampled.
        ref_logprobs: of the reference model. proximal_logprobs: of the policy in training when the first
        update on this batch began; None: that is now.
        """
