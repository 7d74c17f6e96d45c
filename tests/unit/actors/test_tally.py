"""Metrics of micro-batches and ranks put together."""

from forge.actors.trainer.micro_batch import Shares
from forge.actors.trainer.tally import Tally, metrics_of_step


def test_means_are_weighted_and_extremes_are_kept() -> None:
    first, second = Tally(), Tally()
    first.add(2.0, {"kl": 1.0, "ratio_max": 5.0, "ratio_min": 0.5}, weight=0.25, token_weight=0.5)
    second.add(4.0, {"kl": 3.0, "ratio_max": 4.0, "ratio_min": 0.1}, weight=0.75, token_weight=0.5)
    merged = Tally.merge([first, second])
    assert merged.losses == [0.5, 3.0]
    assert merged.metrics == {"kl": 2.5, "ratio_max": 5.0, "ratio_min": 0.1}


def test_ranks_may_report_different_names() -> None:
    first, second = Tally(), Tally()
    first.add(1.0, {"kl": 2.0}, weight=0.5, token_weight=0.5)
    second.add(1.0, {}, weight=0.5, token_weight=0.5)
    assert Tally.merge([first, second]).metrics == {"kl": 1.0}


def test_what_a_loss_averages_over_tokens_is_weighted_by_tokens() -> None:
    tally = Tally(token_means=frozenset({"kl"}))
    tally.add(2.0, {"kl": 1.0, "policy": 1.0}, weight=0.5, token_weight=0.25)
    tally.add(4.0, {"kl": 3.0, "policy": 3.0}, weight=0.5, token_weight=0.75)
    assert tally.losses == [1.0, 2.0]
    assert tally.metrics == {"kl": 2.5, "policy": 2.0}


def test_batches_gathered_for_a_step_count_by_their_sequences_or_tokens() -> None:
    small = Shares("sequences", 1, 30), {"num_tokens": 30.0, "policy": 1.0, "kl": 2.0, "ratio_max": 9.0}
    large = Shares("sequences", 3, 10), {"num_tokens": 10.0, "policy": 5.0, "kl": 6.0, "ratio_max": 4.0}
    assert metrics_of_step([small, large], frozenset({"kl"})) == {
        "num_tokens": 40.0,
        "policy": 0.25 * 1 + 0.75 * 5,
        "kl": 0.75 * 2 + 0.25 * 6,
        "ratio_max": 9.0,
    }
    odd = {"num_tokens": 7.0, "policy": 0.1, "kl": 1 / 3}
    assert metrics_of_step([(Shares("tokens", 7, 7), odd)], frozenset()) == odd
