"""Chunked log-probabilities and entropies against the plain formula in float64, in both forms."""

import math

import pytest
import torch
from torch import Tensor

from forge.errors import ForgeError
from forge.rl.loss import from_hidden, from_logits
from forge.rl.loss.logprobs import compute_entropy, compute_logprobs, compute_logprobs_and_entropy

ROWS, TOKENS, DIM, WORDS = 2, 5, 6, 40
MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tiny tensors are cut, and some of the products are kept."""
    monkeypatch.setattr(from_hidden, "CPU_TILE", (3, 16))
    monkeypatch.setattr(from_hidden, "KEPT_BYTES", 20 * 4 * ROWS * TOKENS)
    monkeypatch.setattr(from_logits, "CPU_CHUNK", 3 * WORDS)


def made(by_head: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Hidden states and head, or logits and None; targets. Logits are a view that no matrix is made of."""
    torch.manual_seed(0)
    hidden, head = torch.randn(ROWS, TOKENS + 1, DIM), torch.randn(WORDS, DIM)
    target_ids = torch.randint(WORDS, (ROWS, TOKENS))
    if by_head:
        return hidden[:, :-1].requires_grad_(), head.requires_grad_(), target_ids
    return (hidden @ head.T)[:, :-1].requires_grad_(), None, target_ids


def plainly(logits: Tensor, head: Tensor | None, target_ids: Tensor, temperature: float) -> list[Tensor]:
    log_p = torch.log_softmax((logits if head is None else logits @ head.T) / temperature, -1)
    return [log_p.gather(-1, target_ids[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("by_head", [False, True], ids=["logits", "head"])
def test_values_and_gradients_equal_the_plain_formula_and_nothing_leaks_from_under_the_mask(
    by_head: bool, masked: bool, temperature: float
) -> None:
    logits, head, target_ids = made(by_head)
    mask = MASK if masked else torch.ones_like(MASK)
    inputs = [tensor for tensor in (logits, head) if tensor is not None]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    want = plainly(exact[0], exact[1] if by_head else None, target_ids, temperature)
    with torch.no_grad():
        logits[~mask] = math.nan
    target_ids = torch.where(mask, target_ids, -100)
    got = compute_logprobs_and_entropy(
        logits, target_ids, temperature, head=head, loss_mask=mask if masked else None
    )
    factors = torch.randn(2, ROWS, TOKENS)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), torch.where(mask, theirs, 0.0), atol=1e-5, rtol=0)
    both = zip(factors, got, want, strict=True)
    sums = torch.stack([torch.stack([(f * m).sum(), (f * t)[mask].sum()]) for f, m, t in both]).sum(0)
    grads = torch.autograd.grad(sums[0], inputs, retain_graph=True)
    for mine, theirs in zip(grads, torch.autograd.grad(sums[1], exact), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("by_head", [False, True], ids=["logits", "head"])
def test_each_alone_is_what_both_give(by_head: bool) -> None:
    logits, head, target_ids = made(by_head)
    logprobs, entropies = compute_logprobs_and_entropy(logits, target_ids, 0.7, head=head)
    assert torch.equal(compute_logprobs(logits, target_ids, 0.7, head=head), logprobs)
    alone = compute_entropy(logits, 0.7, head=head)
    assert torch.equal(alone, entropies)
    first, second = (torch.autograd.grad(value.sum(), logits)[0] for value in (alone, entropies))
    assert torch.equal(first, second)


def test_words_that_cannot_be_sampled_add_nothing() -> None:
    logits = torch.tensor([[1.0, -math.inf, 2.0]], requires_grad=True)
    logprobs, entropies = compute_logprobs_and_entropy(logits, torch.tensor([2]))
    rest = torch.tensor([1.0, 2.0]).log_softmax(0)
    assert logprobs.item() == pytest.approx(rest[1].item(), abs=1e-6)
    assert entropies.item() == pytest.approx(-(rest.exp() * rest).sum().item(), abs=1e-6)
    (logprobs + entropies).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all() and logits.grad[0, 1] == 0


def test_rounded_logits_get_a_gradient_of_their_own_dtype_and_stay_as_they_were() -> None:
    logits, _, target_ids = made(by_head=False)
    rounded = logits.detach().bfloat16().requires_grad_()
    before = rounded.detach().clone()
    value = compute_logprobs(rounded, target_ids)
    want = plainly(before.double(), None, target_ids, 1.0)[0]
    torch.testing.assert_close(value.double(), want, atol=1e-5, rtol=0)
    value.sum().backward()
    assert rounded.grad is not None and rounded.grad.dtype == torch.bfloat16
    assert torch.equal(rounded, before)


def test_what_does_not_fit_together_is_named() -> None:
    logits, target_ids = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ForgeError, match=r"must lie in \[0, 4\), the vocabulary, got 0 to 4: .*loss_mask"):
        compute_logprobs(logits, target_ids + torch.tensor([0, 0, 4]))
    with pytest.raises(ForgeError, match="temperature must be positive, got 0"):
        compute_entropy(logits, 0.0)
    with pytest.raises(ForgeError, match=r"target_ids must be \[2, 3\], .* got \[3\]"):
        compute_logprobs(logits, target_ids[0])
    with pytest.raises(ForgeError, match=r"head must be \[V, D\] .* got \[4, 5\] and \[2, 3, 4\]"):
        compute_logprobs(logits, target_ids, head=torch.zeros(4, 5))
