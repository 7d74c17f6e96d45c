"""Log-probabilities and entropies, from logits or from hidden states and the weight of the head.

Some tokens at a time, float32 inside. Masked positions may hold anything: neither value nor gradient leaks.
"""

import torch
from torch import Tensor

from forge.errors import ForgeError
from forge.rl.loss.from_hidden import scores_of_hidden
from forge.rl.loss.from_logits import scores_of_logits


def compute_logprobs(
    logits: Tensor,
    target_ids: Tensor,
    temperature: float = 1.0,
    *,
    head: Tensor | None = None,
    loss_mask: Tensor | None = None,
) -> Tensor:
    """log softmax(logits / temperature) at the targets, natural log.

    logits [..., T, V], target_ids, loss_mask [..., T] -> [..., T] float32; 0 where masked. With `head`, the
    weight [V, D] of the last layer, the first argument is the hidden states [..., T, D] before it, and no
    [T, V] tensor is ever made. Raises ForgeError for targets outside of the vocabulary.
    """
    return compute_logprobs_and_entropy(logits, target_ids, temperature, head=head, loss_mask=loss_mask)[0]


def compute_entropy(
    logits: Tensor,
    temperature: float = 1.0,
    *,
    head: Tensor | None = None,
    loss_mask: Tensor | None = None,
) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): [..., V] -> [...] float32; 0 where masked.

    head, loss_mask: as in `compute_logprobs`.
    """
    any_ids = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return compute_logprobs_and_entropy(logits, any_ids, temperature, head=head, loss_mask=loss_mask)[1]


def compute_logprobs_and_entropy(
    logits: Tensor,
    target_ids: Tensor,
    temperature: float = 1.0,
    *,
    head: Tensor | None = None,
    loss_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Both at once, which costs hardly more than either: log-probabilities and entropies, [..., T] each."""
    _check(logits, target_ids, temperature, head, loss_mask)
    if head is None:
        return scores_of_logits(logits, target_ids, temperature, loss_mask)
    hidden, ids = logits.reshape(-1, logits.shape[-1]), target_ids.reshape(-1)
    if loss_mask is None:
        scores = scores_of_hidden(hidden, head, ids, temperature)
    else:
        places = loss_mask.reshape(-1).nonzero()[:, 0]
        chosen = scores_of_hidden(hidden[places], head, ids[places], temperature)
        scores = [score.new_zeros(ids.shape).index_copy(0, places, score) for score in chosen]
    logprobs, entropies = (score.view(target_ids.shape) for score in scores)
    return logprobs, entropies


def _check(
    logits: Tensor, target_ids: Tensor, temperature: float, head: Tensor | None, loss_mask: Tensor | None
) -> None:
    if not temperature > 0:
        raise ForgeError(f"temperature must be positive, got {temperature}")
    if head is not None and (head.dim() != 2 or head.shape[1] != logits.shape[-1]):
        raise ForgeError(
            f"head must be [V, D] for hidden states [..., T, D], got {list(head.shape)} and "
            f"{list(logits.shape)}"
        )
    for name, tensor in (("target_ids", target_ids), ("loss_mask", loss_mask)):
        if tensor is not None and tensor.shape != logits.shape[:-1]:
            raise ForgeError(
                f"{name} must be {list(logits.shape[:-1])}, the first argument without its last dimension, "
                f"got {list(tensor.shape)}"
            )
    ids = target_ids if loss_mask is None else target_ids[loss_mask.bool()]
    if ids.numel():
        size = logits.shape[-1] if head is None else head.shape[0]
        lowest, highest = torch.stack(ids.aminmax()).tolist()
        if lowest < 0 or highest >= size:
            raise ForgeError(
                f"target_ids must lie in [0, {size}), the vocabulary, got {lowest} to {highest}: mask "
                "padding out with loss_mask"
            )
