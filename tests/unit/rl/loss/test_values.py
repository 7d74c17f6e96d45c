"""Values, gradients and metrics of every loss against the papers' formulas in float64."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.rl.loss import LOSSES, DAPOLoss, GRPOLoss, OffPolicyCorrection, SFTLoss, make_loss
from tests.unit.rl.loss import oracle
from tests.unit.rl.loss.batches import Batch, Loss, evaluate, make_batch, value_and_grad
from tests.unit.rl.loss.cases import HORIZON, Case, every_loss, every_policy_loss

MASK = [[bool(int(place)) for place in row] for row in ("111111", "110000", "011010", "000000", "111110")]
STEP = 1e-6  # of finite differences, in units of the logits


def assert_equals_oracle(
    loss: Loss, batch: Batch, surrogate: oracle.Surrogate, mean: str, horizon: int = HORIZON, **terms: Any
) -> None:
    """Value and gradient by the oracle's autograd; the oracle's gradient by finite differences."""

    def by_the_paper(logits: Tensor) -> Tensor:
        answers = oracle.read(batch, logits, batch.logits)
        return oracle.total(answers, surrogate, mean, horizon, **terms)

    logits = batch.logits.double().requires_grad_()
    want = by_the_paper(logits)
    (want_gradient,) = torch.autograd.grad(want, logits)
    scale = float(want_gradient.abs().max())
    value, gradient = value_and_grad(loss, batch)
    assert value.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(value.double(), want.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-5, atol=1e-5 * scale)
    for place in ((0, 0, 1), (1, 1, 0), (4, 3, 2)):
        by_differences = _difference(by_the_paper, batch.logits.double(), place)
        assert by_differences == pytest.approx(float(want_gradient[place]), rel=1e-5, abs=1e-6 * scale)


def _difference(function: Any, at: Tensor, place: tuple[int, int, int]) -> float:
    with torch.no_grad():
        above, below = at.clone(), at.clone()
        above[place] += STEP
        below[place] -= STEP
        return float(function(above) - function(below)) / (2 * STEP)


@every_loss
@pytest.mark.parametrize("per_token", [False, True], ids=["advantage", "advantages_per_token"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_surrogate(case: Case, per_token: bool, seed: int) -> None:
    batch = make_batch(MASK, seed, per_token=per_token)
    assert_equals_oracle(case.build(), batch, case.surrogate, case.mean)


@every_policy_loss
@pytest.mark.parametrize("mean", oracle.MEANS)
def test_the_kl_term_the_entropy_bonus_and_the_means(case: Case, mean: str) -> None:
    batch = make_batch(MASK, seed=2)
    terms = {"beta": 0.3, "kl_kind": {"token_mean": "k1", "sequence_mean": "k2", "fixed_horizon": "k3"}[mean]}
    terms["entropy_coef"] = 0.2
    loss = case.build(agg_type=mean, horizon=None, **terms)
    assert_equals_oracle(loss, batch, case.surrogate, mean, horizon=len(MASK[0]), **terms)


BOUNDS: dict[str, Any] = {"decoupled": {}, "truncate": {"cap": 1.2}, "mask": {"low": 0.7, "high": 1.4}}


@every_policy_loss
@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("first_update", [False, True], ids=["later_update", "first_update"])
def test_off_policy_corrections(case: Case, kind: str, level: str, first_update: bool) -> None:
    batch = make_batch(MASK, seed=3)
    if first_update:
        batch = replace(batch, proximal_logprobs=None)
    settings = {**BOUNDS[kind], "level": level}
    loss = case.build(correction=OffPolicyCorrection(kind=kind, **settings))
    correction = oracle.Correction(kind, **settings)
    assert_equals_oracle(loss, batch, case.surrogate, case.mean, correction=correction)


@every_loss
def test_logits_of_half_precision_are_computed_with_in_float32(case: Case) -> None:
    batch = make_batch(MASK, seed=4)
    batch = replace(batch, logits=batch.logits.bfloat16())
    want, want_gradient = value_and_grad(case.build(), replace(batch, logits=batch.logits.float()))
    value, gradient = value_and_grad(case.build(), batch)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(value, want, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, want_gradient.bfloat16(), rtol=1e-2, atol=0)


# By name and with the defaults: the surrogate, the mean, and the other terms, as the papers have them.
PAPERS: dict[str, tuple[oracle.Surrogate, str, dict[str, Any]]] = {
    "grpo": (oracle.ppo(0.2, 0.28), "fixed_horizon", {"beta": 0.1}),  # clip-higher, and Dr. GRPO's mean
    "dr_grpo": (oracle.ppo(0.2, 0.2), "fixed_horizon", {}),  # PPO's clip, arXiv 2503.20783
    "dapo": (oracle.ppo(0.2, 0.28), "token_mean", {}),  # section 4.1
    "cispo": (oracle.cispo(None, 4.0), "token_mean", {}),
    "gspo": (oracle.gspo(3e-4, 4e-4), "sequence_mean", {}),  # section 5.1
    "gspo_token": (oracle.gspo_token(3e-4, 4e-4), "sequence_mean", {}),
    "sapo": (oracle.sapo(1.0, 1.05), "sequence_mean", {}),
    "reinforce": (oracle.reinforce, "fixed_horizon", {}),
    "rloo": (oracle.reinforce, "fixed_horizon", {}),
    "reinforce_pp": (oracle.ppo(0.2, 0.2), "sequence_mean", {}),  # arXiv 2501.03262
    "reinforce_pp_baseline": (oracle.ppo(0.2, 0.2), "sequence_mean", {}),
    "ppo": (oracle.ppo(0.2, 0.2), "token_mean", {}),  # table 3's epsilon
    "sft": (oracle.score, "token_mean", {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_defaults_of_every_name(name: str) -> None:
    surrogate, mean, terms = PAPERS[name]
    batch = make_batch(MASK, seed=7, drift=1.5)  # for every bound to be met
    assert_equals_oracle(make_loss(name), batch, surrogate, mean, horizon=len(MASK[0]), **terms)


def test_the_kl_term_of_reinforce_pp_with_a_baseline_is_k2() -> None:  # arXiv 2501.03262
    batch = make_batch(MASK, seed=8)
    loss = make_loss({"name": "reinforce_pp_baseline", "beta": 0.1})
    terms = {"beta": 0.1, "kl_kind": "k2"}
    assert_equals_oracle(loss, batch, oracle.ppo(0.2, 0.2), "sequence_mean", **terms)


def test_metrics_are_those_of_the_tokens() -> None:
    batch = make_batch(MASK, seed=5)
    settings: dict[str, Any] = {"kind": "mask", "low": 0.7, "high": 1.4}
    loss = GRPOLoss(beta=0.1, correction=OffPolicyCorrection(**settings))
    _, _, metrics = evaluate(loss, batch)
    correction = oracle.Correction(**settings)
    answers = [correction.apply(answer) for answer in oracle.read(batch, batch.logits, batch.logits)]
    ratios = [oracle.ratio(answer, t) for answer in answers for t in range(len(answer))]
    weights = [w for answer in answers for w in answer.weight]
    gaps = [n - g for answer in answers for n, g in zip(answer.new, answer.generator, strict=True)]
    kls = [oracle.k3(n, r) for answer in answers for n, r in zip(answer.new, answer.ref, strict=True)]
    want = {
        "policy": oracle.total(answers, oracle.ppo(0.2, 0.28), "fixed_horizon", len(MASK[0])),
        "kl": sum(kls) / len(kls),
        "entropy": sum(h for answer in answers for h in answer.entropy) / len(ratios),
        "ratio_mean": sum(ratios) / len(ratios),
        "ratio_max": max(ratios),
        "clip_frac": sum(not 0.8 <= r <= 1.28 for r in ratios) / len(ratios),
        "logprob_gap": sum(abs(gap) for gap in gaps) / len(gaps),
        "importance_mean": sum(math.exp(gap) for gap in gaps) / len(gaps),
        "importance_square_mean": sum(math.exp(2 * gap) for gap in gaps) / len(gaps),
        "correction_mean": sum(weights) / len(weights),
        "correction_frac": sum(w == 0 for w in weights) / len(weights),
    }
    assert {name: float(v) for name, v in metrics.items()} == pytest.approx(
        {name: float(v) for name, v in want.items()}, rel=1e-5
    )
    assert not any(metric.requires_grad for metric in metrics.values())
    importance = [math.exp(gap) for gap in gaps]
    ess = sum(importance) ** 2 / (len(gaps) * sum(w * w for w in importance))
    whole = loss.whole_batch_metrics({name: float(v) for name, v in metrics.items()})
    assert whole["ess"] == pytest.approx(ess, rel=1e-5) and "importance_mean" not in whole


def test_metrics_of_sft_do_not_weigh_tokens() -> None:
    batch = make_batch(MASK, seed=5)
    _, _, metrics = evaluate(SFTLoss(), batch)
    answers = oracle.read(batch, batch.logits, batch.logits)
    want = {
        "nll": oracle.token_mean([[-x for x in answer.new] for answer in answers], 1),
        "entropy": oracle.token_mean([answer.entropy for answer in answers], 1),
    }
    assert {name: float(v) for name, v in metrics.items()} == pytest.approx(
        {name: float(v) for name, v in want.items()}, rel=1e-5
    )


def test_an_adaptive_coefficient_follows_the_measured_kl() -> None:
    loss = DAPOLoss(clip_range=0.2, adaptive_kl=True, kl_target=0.01)
    batch, beta = make_batch(MASK, seed=6), 0.1
    for kl in (0.5, 0.0101, 0.009, 0.0, 0.02):
        terms = {"beta": beta, "kl_kind": "k3"}
        assert_equals_oracle(loss, batch, oracle.ppo(0.2, 0.2), "token_mean", **terms)
        loss.after_step({"kl": kl})
        beta = oracle.next_beta(beta, kl, 0.01)
    restored = DAPOLoss(clip_range=0.2, adaptive_kl=True, kl_target=0.01)
    restored.load_state_dict(loss.state_dict())
    assert_equals_oracle(restored, batch, oracle.ppo(0.2, 0.2), "token_mean", beta=beta)
