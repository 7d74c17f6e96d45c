"""Random batches as a loss gets them, and what may be done to one without a change of the loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

NAN, INF = float("nan"), float("inf")
Metrics = dict[str, Tensor]
Loss = Callable[..., tuple[Tensor, Metrics]]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The arguments of a loss: logits [N, T, V], advantages [N] or [N, T], and the others [N, T]."""

    logits: Tensor
    target_ids: Tensor
    advantages: Tensor
    generator_logprobs: Tensor
    loss_mask: Tensor
    ref_logprobs: Tensor | None
    proximal_logprobs: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Every tensor changed."""
        return replace(
            self,
            **{f.name: change(value) for f in fields(self) if (value := getattr(self, f.name)) is not None},
        )

    def rows(self, numbers: Sequence[int]) -> "Batch":
        chosen = torch.tensor(numbers, dtype=torch.long)
        return self.map(lambda tensor: tensor[chosen])

    def padded(self, columns: int) -> "Batch":
        """Masked places behind every row."""

        def pad(tensor: Tensor) -> Tensor:
            behind = [0, 0] * (tensor.dim() - 2) + [0, columns]
            return tensor if tensor.dim() == 1 else F.pad(tensor, behind)

        return self.map(pad)

    def with_garbage(self, seed: int) -> "Batch":
        """NaN, infinities, huge numbers and impossible tokens wherever a place or a row is masked."""
        random = torch.Generator().manual_seed(seed)
        odd_numbers = torch.tensor([NAN, INF, -INF, 1e38, -1e38, 0.0])
        odd_tokens = torch.tensor([-100, 10**9, -1, 0])

        def spoil(tensor: Tensor) -> Tensor:
            if tensor.dtype is torch.bool:
                return tensor
            odd = odd_numbers if tensor.is_floating_point() else odd_tokens
            garbage = odd[torch.randint(len(odd), tensor.shape, generator=random)].to(tensor.dtype)
            keep = self.loss_mask.any(-1) if tensor.dim() == 1 else self.loss_mask
            return torch.where(keep[..., None] if tensor.dim() == 3 else keep, tensor, garbage)

        return self.map(spoil)

    def on_policy(self) -> "Batch":
        """Generated and prepared by the policy itself: every ratio is 1."""
        own = own_logprobs(self.logits, self.target_ids)
        return replace(self, generator_logprobs=own, proximal_logprobs=own)


def own_logprobs(logits: Tensor, target_ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, target_ids[..., None])[..., 0]


def make_batch(
    mask: Sequence[Sequence[bool]], seed: int, *, per_token: bool = False, vocab: int = 5, drift: float = 0.4
) -> Batch:
    """`drift`: the deviation of the other policies' log-probabilities from the policy's own, in nats."""
    random = torch.Generator().manual_seed(seed)
    loss_mask = torch.tensor(mask, dtype=torch.bool)
    num_rows, length = loss_mask.shape
    logits = torch.randn(num_rows, length, vocab, generator=random) * 1.5
    target_ids = torch.randint(vocab, loss_mask.shape, generator=random)
    own = own_logprobs(logits, target_ids)

    def other() -> Tensor:
        return own + drift * torch.randn(loss_mask.shape, generator=random)

    advantages = torch.randn(loss_mask.shape, generator=random)
    return Batch(
        logits=logits,
        target_ids=target_ids,
        advantages=advantages if per_token else advantages[:, 0],
        generator_logprobs=other(),
        loss_mask=loss_mask,
        ref_logprobs=other(),
        proximal_logprobs=other(),
    )


@st.composite
def batches(draw: st.DrawFn, max_rows: int = 5, max_length: int = 6) -> Batch:
    """Any mask with an unmasked token, holes and empty rows included."""
    num_rows = draw(st.integers(1, max_rows))
    length = draw(st.integers(1, max_length))
    row = st.lists(st.booleans(), min_size=length, max_size=length)
    masks = st.lists(row, min_size=num_rows, max_size=num_rows)
    mask = draw(masks.filter(lambda rows: any(any(row) for row in rows)))
    return make_batch(mask, draw(st.integers(0, 2**32)), per_token=draw(st.booleans()))


def value_and_grad(loss: Loss, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss and its gradient with respect to the logits."""
    value, gradient, _ = evaluate(loss, batch)
    return value, gradient


def evaluate(loss: Loss, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
    """`value_and_grad`, and the metrics."""
    logits = batch.logits.detach().clone().requires_grad_()
    value, metrics = loss(
        logits,
        batch.target_ids,
        batch.advantages,
        batch.generator_logprobs,
        batch.loss_mask,
        batch.ref_logprobs,
        proximal_logprobs=batch.proximal_logprobs,
    )
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient, metrics
