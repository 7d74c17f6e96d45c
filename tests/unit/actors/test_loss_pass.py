"""What a user's loss may be, and what is said when it is something else."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.actors.trainer.loss_pass import Loss, as_floats, loss_of, normalizer_of
from forge.actors.trainer.readout import Readout
from forge.data_models import TrainTargets
from forge.errors import ConfigError, ForgeError, NotFinite
from forge.rl.loss import SFTLoss

HIDDEN, VOCAB = 3, 7


def read(loss: Loss, proximal_logprobs: Tensor | None = None) -> tuple[Tensor, dict[str, float]]:
    """What the loss gives for two targets, from a head of random weights."""
    torch.manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)

    def head(
        hidden: Tensor, target_ids: Tensor | None = None, temperature: float = 1.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        logits = hidden @ weight.T
        if target_ids is None:
            return logits
        log_p = torch.log_softmax(logits / temperature, -1)
        return log_p.gather(-1, target_ids[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)

    targets = TrainTargets(
        source_ids=torch.tensor([[0, 1]]),
        target_ids=torch.tensor([[4, 2]]),
        loss_mask=torch.tensor([[True, True]]),
        advantages=torch.ones(1),
        generator_logprobs=torch.zeros(1, 2),
        proximal_logprobs=proximal_logprobs,
    )
    value, metrics = loss_of(Readout(head, torch.randn(2, HIDDEN), torch.arange(2), 2), loss, targets)
    return value, as_floats(metrics)


class Doubled(SFTLoss):
    """Says anew what a call computes, and inherits the short cut, which does not know of it."""

    def __call__(self, *args: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = SFTLoss.__call__(self, *args)  # type: ignore[arg-type]
        return 2 * loss, metrics


class Tripled(Doubled):
    """Has a short cut of its own again."""

    def from_logprobs(self, *args: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = SFTLoss.from_logprobs(self, *args)  # type: ignore[arg-type]
        return 3 * loss, metrics


@pytest.mark.parametrize(("loss", "factor"), [(Doubled(), 2), (Tripled(), 3)])
def test_a_subclass_is_asked_by_what_it_says_anew(loss: SFTLoss, factor: int) -> None:
    (plain, facts), (value, same) = read(SFTLoss()), read(loss)
    assert value.item() == pytest.approx(factor * plain.item(), rel=1e-5)
    assert same == pytest.approx(facts, rel=1e-5)


class Proximal(SFTLoss):
    """Reads the trainer's own policy of before, where it is given one."""

    def from_logprobs(self, *args: Tensor | None, proximal_logprobs: Tensor | None = None) -> Any:
        loss, _ = SFTLoss.from_logprobs(self, *args)  # type: ignore[arg-type]
        return loss, {"proximal": torch.nan if proximal_logprobs is None else proximal_logprobs.sum()}


class ProximalByLogits:
    """The same, asked by its call."""

    def __call__(self, logits: Tensor, *_: Tensor | None, proximal_logprobs: Tensor | None = None) -> Any:
        return logits.sum(), {"proximal": torch.nan if proximal_logprobs is None else proximal_logprobs.sum()}


@pytest.mark.parametrize("loss", [Proximal(), ProximalByLogits()])
def test_the_proximal_policy_is_given_where_the_batch_holds_it(loss: Loss) -> None:
    assert read(loss, torch.tensor([[1.0, 2.0]]))[1] == {"proximal": 3.0}
    assert math.isnan(read(loss)[1]["proximal"])
    with pytest.raises(ForgeError, match="the loss: TypeError: .*proximal_logprobs"):
        read(OfSixArguments(), torch.zeros(1, 2))


class OfSixArguments:
    """Knows nothing of it."""

    def __call__(self, logits: Tensor, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return logits.sum(), {}


def total(logits: Tensor) -> Tensor:
    return logits.sum()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (total, "got Tensor"),
        (lambda logits: (logits.sum(), {}, {}), "got tuple of 3"),
        (lambda logits: (1.0, {}), "its loss is a float"),
        (lambda logits: (logits.sum(-1), {}), r"its loss is a Tensor of shape \[1, 2\]"),
        (lambda logits: (logits.sum().detach(), {}), "its loss has no gradient: was it detached"),
        (lambda logits: (logits.sum(), None), "its metrics are a NoneType"),
        (lambda logits: (logits.sum(), {"kl": logits}), r"its metric kl is a tensor of shape \[1, 2, 7\]"),
        (lambda logits: (logits.sum(), {"kl": "high"}), "its metric kl is a str"),
        (
            lambda logits: (logits.sum(), {"total": 1.0}),
            "its metric total has the name of one of the trainer",
        ),
    ],
)
def test_what_is_no_answer_of_a_loss_is_named(answer: Callable[[Tensor], object], says: str) -> None:
    with pytest.raises(ForgeError, match=rf"a loss must return \(loss, metrics\): .*; {says}"):
        read(lambda logits, *_: answer(logits))  # type: ignore[arg-type,return-value]


def test_what_a_loss_raises_is_a_forge_error_that_names_it() -> None:
    def fail(error: Exception) -> Loss:
        def loss(*_: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            raise error

        return loss

    with pytest.raises(ForgeError, match="^the loss: ZeroDivisionError: by nought$") as caught:
        read(fail(ZeroDivisionError("by nought")))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(NotFinite, match="^as it is$"):
        read(fail(NotFinite("as it is")))


def test_a_loss_averages_over_sequences_or_tokens() -> None:
    loss = SFTLoss()
    assert normalizer_of(loss) == "tokens"
    assert normalizer_of(lambda *_: (torch.zeros(()), {})) == "sequences"

    class PerRow(SFTLoss):
        normalize_by = "rows"  # type: ignore[assignment]

    with pytest.raises(ConfigError, match='must be "sequences" or "tokens".* got .rows. of PerRow'):
        normalizer_of(PerRow())
