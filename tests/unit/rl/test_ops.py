"""The terms of the losses against float64 written out by hand."""

import math

import pytest
import torch

from forge.rl.loss.ops import aggregate, compute_entropy, compute_kl, compute_logprobs, compute_ratio


def test_logprobs_equal_a_float64_softmax_at_any_temperature() -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(3, 5, 40) * 5, torch.randint(0, 40, (3, 5))
    for temperature in (1.0, 0.7):
        got = compute_logprobs(logits.bfloat16(), ids, temperature)
        exact = logits.bfloat16().double() / temperature
        for n in range(3):
            for t in range(5):
                row = exact[n, t]
                want = row[ids[n, t]] - math.log(sum(math.exp(x) for x in row.tolist()))
                assert got.dtype == torch.float32
                assert abs(got[n, t].item() - want.item()) < 1e-5


def test_entropy_equals_the_sum_of_p_log_p() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 7)
    p = torch.softmax(logits.double(), -1)
    torch.testing.assert_close(compute_entropy(logits).double(), -(p * p.log()).sum(-1), atol=1e-6, rtol=0)


def test_kl_estimators_average_to_the_exact_divergence() -> None:
    torch.manual_seed(0)
    pi, ref = torch.randn(6).double().log_softmax(-1), torch.randn(6).double().log_softmax(-1)
    exact = (pi.exp() * (pi - ref)).sum().item()
    mask = torch.ones(6, dtype=torch.bool)
    for kind in ("k1", "k3"):  # the expectation over tokens drawn from pi, taken exactly
        estimate = (pi.exp() * compute_kl(pi, ref, mask, kind).double()).sum().item()
        assert estimate == pytest.approx(exact, abs=1e-6)
    torch.testing.assert_close(
        compute_kl(pi, ref, mask, "k2").double(), (pi - ref) ** 2 / 2, atol=1e-6, rtol=0
    )
    assert (compute_kl(pi, ref, mask) >= 0).all()


def test_aggregates_equal_their_definitions_written_as_loops() -> None:
    values = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    assert aggregate(values, mask, "token_mean").item() == pytest.approx((1 + 2 + 4) / 3)
    assert aggregate(values, mask, "sequence_mean").item() == pytest.approx(((1 + 2) / 2 + 4) / 2)
    assert aggregate(values, mask, "fixed_horizon").item() == pytest.approx((3 / 3 + 4 / 3) / 2)
    assert aggregate(values, mask, "fixed_horizon", horizon=10).item() == pytest.approx((3 / 10 + 4 / 10) / 2)
    with pytest.raises(ValueError, match="agg_type"):
        aggregate(values, mask, "mean")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_under_the_mask_never_leaks_into_values_or_gradients(garbage: float) -> None:
    mask = torch.tensor([[True, True, False]])
    logprobs = torch.tensor([[-1.0, -2.0, garbage]], requires_grad=True)
    other = torch.tensor([[-1.5, -1.0, garbage]])
    ratio = compute_ratio(logprobs, other, mask)
    assert ratio[0].tolist() == pytest.approx([math.exp(0.5), math.exp(-1), 1.0])
    total = aggregate(ratio, mask, "token_mean") + aggregate(
        compute_kl(logprobs, other, mask), mask, "token_mean"
    )
    total.backward()
    assert logprobs.grad is not None and torch.isfinite(logprobs.grad).all() and logprobs.grad[0, 2] == 0
