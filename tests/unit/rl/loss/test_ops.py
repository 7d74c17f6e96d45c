"""The terms that losses are made of, each against its definition in float64."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forge.rl.loss.ops import aggregate, compute_entropy, compute_kl, compute_logprobs, compute_ratio
from tests.unit.rl.loss import oracle
from tests.unit.rl.loss.batches import Batch, batches
from tests.unit.rl.loss.test_properties import few


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_logprobs_and_entropy_at_a_temperature(temperature: float) -> None:
    torch.manual_seed(0)
    logits, ids = (torch.randn(3, 5, 40) * 5).bfloat16(), torch.randint(0, 40, (3, 5))
    logprobs = compute_logprobs(logits, ids, temperature)
    assert logprobs.dtype == torch.float32
    for n in range(3):
        for t in range(5):
            want = oracle.logprob(logits[n, t], int(ids[n, t]), temperature)
            assert float(logprobs[n, t]) == pytest.approx(float(want), abs=1e-5)
    entropy = compute_entropy(logits)
    want_entropy = torch.stack([torch.stack([oracle.entropy(row) for row in rows]) for rows in logits])
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)


@few
@given(batch=batches(), kind=st.sampled_from(list(oracle.KL)))
def test_ratios_and_kl_of_every_token(batch: Batch, kind: Any) -> None:
    logprobs, old, mask = batch.generator_logprobs, batch.ref_logprobs, batch.loss_mask
    assert old is not None
    per_token = compute_ratio(logprobs, old, mask)
    per_sequence = compute_ratio(logprobs, old, mask, level="sequence").expand(mask.shape)
    kl = compute_kl(logprobs, old, mask, kind)
    for i, row in enumerate(mask):
        places = row.nonzero()[:, 0].tolist()
        gaps = [float(logprobs[i, t]) - float(old[i, t]) for t in places]
        for t, gap in zip(places, gaps, strict=True):
            assert float(per_token[i, t]) == pytest.approx(math.exp(gap), rel=1e-5)
            assert float(per_sequence[i, t]) == pytest.approx(math.exp(sum(gaps) / len(gaps)), rel=1e-5)
            want = oracle.KL[kind](logprobs[i, t].double(), old[i, t].double())
            assert float(kl[i, t]) == pytest.approx(float(want), rel=1e-4, abs=1e-6)


def test_unbiased_kl_estimators_average_to_the_divergence() -> None:
    """The expectation over tokens drawn from pi, taken exactly; k2 has a bias."""
    torch.manual_seed(0)
    pi, ref = torch.randn(6).double().log_softmax(-1), torch.randn(6).double().log_softmax(-1)
    exact = float((pi.exp() * (pi - ref)).sum())
    mask = torch.ones(6, dtype=torch.bool)
    for kind in ("k1", "k3"):
        estimate = float((pi.exp() * compute_kl(pi, ref, mask, kind).double()).sum())
        assert estimate == pytest.approx(exact, abs=1e-6)


@few
@given(batch=batches(), mean=st.sampled_from(list(oracle.MEANS)), horizon=st.none() | st.integers(1, 20))
def test_aggregates_and_their_parts_by_global_counts(batch: Batch, mean: Any, horizon: int | None) -> None:
    values, mask = batch.generator_logprobs, batch.loss_mask
    answers = [values[i][row].double() for i, row in enumerate(mask) if row.any()]
    want = float(oracle.MEANS[mean]([list(a) for a in answers], horizon or mask.shape[1]))
    assert float(aggregate(values, mask, mean, horizon)) == pytest.approx(want, rel=1e-5, abs=1e-6)
    counts = {"num_tokens": int(mask.sum()), "num_sequences": len(answers)}
    parts = [aggregate(values[i : i + 1], mask[i : i + 1], mean, horizon, **counts) for i in range(len(mask))]
    assert float(sum(parts)) == pytest.approx(want, rel=1e-5, abs=1e-6)


@few
@given(batch=batches(), seed=st.integers(0, 2**32))
def test_what_stands_under_the_mask_leaks_neither_into_values_nor_into_gradients(
    batch: Batch, seed: int
) -> None:
    def everything(of: Batch) -> tuple[Tensor, Tensor]:
        logits = of.logits.clone().requires_grad_()
        mask, other = of.loss_mask, of.generator_logprobs
        logprobs = compute_logprobs(logits, of.target_ids, loss_mask=mask)
        terms: list[Tensor] = [logprobs, compute_entropy(logits, loss_mask=mask)]
        terms += [
            compute_ratio(logprobs, other, mask),
            compute_ratio(logprobs, other, mask, level="sequence"),
        ]
        terms += [compute_kl(logprobs, other, mask, kind) for kind in ("k1", "k2", "k3")]
        means = [aggregate(term.expand(mask.shape), mask, mean) for term in terms for mean in oracle.MEANS]
        total = torch.stack(means).sum()
        return total.detach(), torch.autograd.grad(total, logits)[0]

    torch.testing.assert_close(everything(batch.with_garbage(seed)), everything(batch), rtol=0, atol=0)
