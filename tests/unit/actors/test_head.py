"""Log-probabilities and entropies of tokens, against autograd through log_softmax."""

import pytest
import torch

from forge.actors.trainer import head
from forge.actors.trainer.head import spread, token_logprobs


@pytest.mark.parametrize("chunk_bytes", [1, 2**21], ids=["row by row", "at once"])
def test_values_and_gradients_equal_log_softmax(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(6, 50, generator=generator)).requires_grad_()
    targets = torch.randint(50, (6,), generator=generator)
    a, b = torch.randn(2, 6, generator=generator)

    logprobs, entropy = token_logprobs(logits, targets, temperature=0.7)
    (got,) = torch.autograd.grad((a * logprobs + b * entropy).sum(), logits)

    log_p = torch.log_softmax(logits / 0.7, -1)
    want_logprobs, want_entropy = log_p[range(6), targets], -(log_p.exp() * log_p).sum(-1)
    (want,) = torch.autograd.grad((a * want_logprobs + b * want_entropy).sum(), logits)
    assert (logprobs - want_logprobs).abs().max() < 1e-5
    assert (entropy - want_entropy).abs().max() < 1e-5
    assert (got - want).abs().max() < 1e-5


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.randn(3, 10, requires_grad=True)
    before = logits.detach().clone()
    logprobs, _ = token_logprobs(logits, torch.tensor([1, 2, 3]), temperature=2.0)
    logprobs.sum().backward()
    assert torch.equal(logits, before)


def test_an_entropy_that_no_loss_uses_costs_no_gradient() -> None:
    logits = torch.randn(3, 10, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1, 2, 3]))
    (alone,) = torch.autograd.grad(logprobs.sum(), logits, retain_graph=True)
    (with_entropy,) = torch.autograd.grad(logprobs.sum() + 0 * entropy.sum(), logits)
    assert (alone - with_entropy).abs().max() < 1e-6


def test_values_return_to_their_unmasked_places() -> None:
    mask = torch.tensor([[True, False, True], [False, True, False]])
    assert spread(torch.tensor([1.0, 2.0, 3.0]), mask).tolist() == [[1, 0, 2], [0, 3, 0]]
    assert spread(torch.ones(6, 2), torch.ones(2, 3, dtype=torch.bool)).shape == (2, 3, 2)
