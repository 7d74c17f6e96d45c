"""What must not change a loss, what gives no gradient, and what the gradient is where all policies agree."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge.actors.trainer.loss_pass import as_floats, token_means_of, whole_batch_metrics
from forge.actors.trainer.micro_batch import Shares
from forge.actors.trainer.tally import Tally
from forge.data_models import TrainTargets
from forge.rl.loss import GSPOLoss, OffPolicyCorrection
from tests.unit.rl.loss import oracle
from tests.unit.rl.loss.batches import Batch, batches, evaluate, make_batch, value_and_grad
from tests.unit.rl.loss.cases import HORIZON, Case, every_loss, every_policy_loss

few = settings(max_examples=15, deadline=None, derandomize=True)

KINDS: Any = ["decoupled", "truncate", "mask"]
LEVELS: Any = ["token", "sequence"]
BOUNDS: dict[str, dict[str, float]] = {"truncate": {"cap": 1.2}}
corrections = st.builds(
    lambda kind, level: OffPolicyCorrection(kind, level=level, **BOUNDS.get(kind, {})),
    kind=st.sampled_from(KINDS),
    level=st.sampled_from(LEVELS),
)
any_settings = st.fixed_dictionaries(
    {
        "agg_type": st.sampled_from(list(oracle.MEANS)),
        "beta": st.sampled_from([0.0, 0.3]),
        "kl_kind": st.sampled_from(list(oracle.KL)),
        "entropy_coef": st.sampled_from([0.0, 0.2]),
        "correction": st.none() | corrections,
    }
)


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    scale = float(want[1].abs().max())
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-6 + 1e-5 * scale)


@every_loss
@few
@given(batch=batches(), chosen=any_settings, columns=st.integers(1, 4))
def test_padding_changes_nothing(case: Case, batch: Batch, chosen: dict[str, Any], columns: int) -> None:
    loss, length = case.build(**chosen), batch.loss_mask.shape[1]
    value, gradient, metrics = evaluate(loss, batch)
    padded_value, padded_gradient, padded_metrics = evaluate(loss, batch.padded(columns))
    assert_same((padded_value, padded_gradient[:, :length]), (value, gradient))
    assert not padded_gradient[:, length:].any()
    torch.testing.assert_close(padded_metrics, metrics, rtol=1e-5, atol=1e-6)


@every_loss
@few
@given(batch=batches(), chosen=any_settings, data=st.data())
def test_the_order_of_sequences_changes_nothing(
    case: Case, batch: Batch, chosen: dict[str, Any], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(batch.loss_mask))))
    loss = case.build(**chosen)
    value, gradient, metrics = evaluate(loss, batch)
    other_value, other_gradient, other_metrics = evaluate(loss, batch.rows(order))
    assert_same((other_value, other_gradient), (value, gradient[list(order)]))
    torch.testing.assert_close(other_metrics, metrics, rtol=1e-5, atol=1e-6)


@every_loss
@few
@given(batch=batches(), chosen=any_settings, data=st.data())
def test_micro_batches_as_the_trainer_weighs_them_sum_up_to_the_batch(
    case: Case, batch: Batch, chosen: dict[str, Any], data: st.DataObject
) -> None:
    num_rows = len(batch.loss_mask)
    parts = data.draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows))
    loss: Any = case.build(**chosen)
    shares = Shares.of([_targets(batch)], loss.normalize_by)
    tally, gradient = Tally(token_means_of(loss)), torch.zeros_like(batch.logits)
    for part in set(parts):
        rows = [row for row, of_row in enumerate(parts) if of_row == part]
        own = batch.rows(rows)
        own_value, own_gradient, metrics = evaluate(loss, own)
        weight, token_weight = shares.weight(_targets(own)), shares.token_weight(_targets(own))
        tally.add(float(own_value), as_floats(metrics), weight, token_weight)
        gradient[rows] = weight * own_gradient
    value, want_gradient, want_metrics = evaluate(loss, batch)
    assert_same((torch.tensor(sum(tally.losses)), gradient), (value, want_gradient))
    assert tally.metrics == pytest.approx(as_floats(want_metrics), rel=1e-4, abs=1e-5)
    whole, want = (whole_batch_metrics(loss, m) for m in (tally.metrics, as_floats(want_metrics)))
    assert whole == pytest.approx(want, rel=1e-3, abs=1e-5)


def _targets(batch: Batch) -> TrainTargets:
    return TrainTargets(
        source_ids=torch.zeros_like(batch.target_ids),
        target_ids=batch.target_ids,
        loss_mask=batch.loss_mask,
        advantages=batch.advantages,
        generator_logprobs=batch.generator_logprobs,
    )


@every_loss
@few
@given(batch=batches(), chosen=any_settings, seed=st.integers(0, 2**32))
def test_garbage_under_the_mask_changes_nothing(
    case: Case, batch: Batch, chosen: dict[str, Any], seed: int
) -> None:
    loss = case.build(**chosen)
    value, gradient, metrics = evaluate(loss, batch)
    dirty_value, dirty_gradient, dirty_metrics = evaluate(loss, batch.with_garbage(seed))
    assert dirty_value == value
    assert torch.equal(dirty_gradient, gradient)
    assert dirty_metrics == metrics


@every_loss
def test_a_batch_without_any_token_has_neither_value_nor_gradient(case: Case) -> None:
    batch = make_batch([[False, False]] * 2, seed=0).with_garbage(0)
    value, gradient, metrics = evaluate(case.build(), batch)
    assert value == 0
    assert not gradient.any()
    assert all(metric.isfinite() for metric in metrics.values())


@every_loss
@few
@given(batch=batches(), correction=st.none() | corrections)
def test_no_advantage_no_policy_gradient(
    case: Case, batch: Batch, correction: OffPolicyCorrection | None
) -> None:
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    value, gradient = value_and_grad(case.build(correction=correction), batch)
    assert value == 0
    assert not gradient.any()


@every_policy_loss
@few
@given(batch=batches(), mean=st.sampled_from(list(oracle.MEANS)), correction=st.none() | corrections)
def test_where_every_ratio_is_one_the_gradient_is_that_of_reinforce(
    case: Case, batch: Batch, mean: str, correction: OffPolicyCorrection | None
) -> None:
    """SAPO's gate has the slope 1 there whatever its temperature (4 / tau in arXiv 2511.20347 is for that). A
    GSPO answer has one ratio, whose gradient is the mean of its tokens' (arXiv 2507.18071, eq. 10):
    advantages per token count by their mean."""
    batch = batch.on_policy()
    logits = batch.logits.double().requires_grad_()
    answers = oracle.read(batch, logits, batch.logits)
    if case.name == "gspo":
        answers = [
            replace(answer, advantages=[sum(answer.advantages) / len(answer)] * len(answer))
            for answer in answers
        ]
    by_reinforce = oracle.total(answers, oracle.score, mean, HORIZON)
    (want,) = torch.autograd.grad(by_reinforce, logits)
    _, gradient = value_and_grad(case.build(agg_type=mean, correction=correction), batch)
    torch.testing.assert_close(gradient.double(), want, rtol=1e-4, atol=1e-6 + 1e-5 * float(want.abs().max()))


@few
@given(batch=batches(), mean=st.sampled_from(list(oracle.MEANS)), correction=st.none() | corrections)
def test_gspo_token_is_gspo_where_an_answer_has_one_advantage(
    batch: Batch, mean: str, correction: OffPolicyCorrection | None
) -> None:
    """Section 4.3 of arXiv 2507.18071."""
    if batch.advantages.dim() == 2:
        batch = replace(batch, advantages=batch.advantages[:, 0])
    settings = {"agg_type": mean, "correction": correction and replace(correction, level="sequence")}
    token, sequence = (GSPOLoss(level=level, **settings) for level in ("token", "sequence"))
    assert_same(value_and_grad(token, batch), value_and_grad(sequence, batch))


@every_policy_loss
@pytest.mark.parametrize("gap", [-1e4, -90.0, 90.0, 1e4])
def test_policies_however_far_apart_give_numbers(case: Case, gap: float) -> None:
    """`gap` in nats from the other policies to the one in training; exp(90) is more than float32 has."""
    batch = make_batch([[True, True], [True, False], [True, True]], seed=0)
    far = replace(
        batch,
        advantages=torch.tensor([-1.0, 0.0, 1.0]),
        generator_logprobs=batch.generator_logprobs - gap,
        ref_logprobs=batch.generator_logprobs - gap,
    )
    corrections = [None, *(OffPolicyCorrection(k, level=v) for k in KINDS for v in LEVELS)]
    for correction in corrections:
        for kl_kind in oracle.KL:
            loss = case.build(beta=0.1, kl_kind=kl_kind, entropy_coef=0.1, correction=correction)
            value, gradient, metrics = evaluate(loss, far)
            assert value.isfinite()
            assert gradient.isfinite().all()
            assert all(metric.isfinite() for metric in metrics.values())
