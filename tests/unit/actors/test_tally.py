"""Metrics of micro-batches and ranks put together."""

from forge.actors.trainer.tally import Tally


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
