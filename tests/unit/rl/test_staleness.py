"""AdaptiveAge against a pipeline of which it is known how far ahead rollouts must run to keep it busy."""

import math
from itertools import pairwise

import pytest

from forge.errors import ConfigError
from forge.rl.staleness import AdaptiveAge


def row(wait: float = 0.0, ess: float = 1.0, gap: float = 0.0) -> dict[str, float]:
    return {"loss/ess": ess, "loss/logprob_gap": gap, "time/wait_s": 20 * wait, "time/step_s": 20.0}


def pipeline(
    bound: AdaptiveAge, latency: float, steps: int, *, share: float = 0.0, worst: int = 1000
) -> list[int]:
    """A rollout lasts `latency` training steps and `share` of one for each step's worth that is under way;
    batches of an age above `worst` are bad. What is let in shows up in the batches when what was let in
    before has been trained on."""
    ages, let_in = [], [bound.age]
    for _ in range(steps):
        seen = let_in[max(0, len(let_in) - 1 - let_in[-1])]  # of when this batch was let in
        wait = max(0.0, 1 - (seen + 1) / (latency + share * (seen + 1)))
        ages.append(bound.after_step(row(wait, ess=1.0 if seen <= worst else 0.5)))
        let_in.append(ages[-1])
    return ages


@pytest.mark.parametrize("latency", [1.5, 4.0, 9.7])
def test_it_goes_to_the_least_age_that_keeps_the_learner_busy_and_stays(latency: float) -> None:
    ages = pipeline(AdaptiveAge(limit=16), latency, steps=60)
    assert ages == sorted(ages)
    assert set(ages[30:]) == {math.ceil(latency) - 1}


def test_it_allows_for_generators_that_are_slower_the_more_they_have_under_way() -> None:
    """2.6 / (age + 1) + 0.75 = 1 at 9.4; from one round alone 3 leads to 5."""
    ages = pipeline(AdaptiveAge(limit=32), 2.6, steps=60, share=0.75)
    assert sorted(set(ages)) == [1, 3, 7, 10]
    assert set(ages[32:]) == {10}


@pytest.mark.parametrize("latency", [0.0, 0.2])
def test_it_stays_where_more_under_way_would_not_help(latency: float) -> None:
    """Generators of which every place is taken need 1.2 times as long as the trainer: it always waits."""
    assert max(pipeline(AdaptiveAge(limit=64), latency, steps=400, share=1.2)) < 16


def test_a_wait_now_and_then_does_not_raise_it_and_as_much_of_a_round_does() -> None:
    def after(waits: list[float]) -> int:
        bound = AdaptiveAge(limit=16)
        pipeline(bound, latency=8.0, steps=60)
        assert bound.age == 7
        return max([bound.after_step(row(wait)) for wait in waits])

    assert after([*[0.0] * 15, 0.07] * 10) == 7
    assert after([*[0.0] * 7, 0.15] * 10) > 7


def test_it_never_passes_the_limit() -> None:
    ages = pipeline(AdaptiveAge(limit=5), latency=9.7, steps=60)
    assert max(ages) == ages[-1] == 5


def test_bad_batches_hold_it_back_and_it_then_feels_its_way() -> None:
    bound = AdaptiveAge(limit=16)
    ages = pipeline(bound, latency=12.0, steps=400, worst=6)
    changes = [(a, b) for a, b in pairwise(ages) if a != b]
    first_down = next(i for i, (a, b) in enumerate(changes) if b < a)
    assert any(b > a + 1 for a, b in changes[:first_down])
    assert all(b in (a // 2, a + 1) for a, b in changes[first_down:])
    assert max(b for _, b in changes[first_down:]) <= 7


SKIPPED = {"trainer/skipped": 1.0, "time/wait_s": 20.0, "time/step_s": 20.0}


@pytest.mark.parametrize("bad", [row(1.0, ess=0.5), row(1.0, gap=0.2), row(1.0, ess=math.nan), SKIPPED])
def test_what_is_neither_good_nor_bad_changes_nothing_what_is_bad_or_no_number_lowers(bad: dict) -> None:
    bound = AdaptiveAge(limit=4)
    assert [bound.after_step(row(0.5, ess=0.85)) for _ in range(9)] == [1] * 9
    assert [bound.after_step(row(0.5, gap=0.07)) for _ in range(9)] == [1] * 9
    assert bound.after_step(bad) == 0


def test_it_is_never_below_what_lets_a_rollout_begin() -> None:
    bound = AdaptiveAge(limit=8, sync_interval=3)
    assert bound.age == 3
    assert min(bound.after_step(row(ess=0.1)) for _ in range(40)) == 2
    with pytest.raises(ConfigError, match=r"staleness.limit must be at least 3, got 2"):
        AdaptiveAge(limit=2, sync_interval=3)


def test_it_goes_on_from_its_state_and_a_lower_limit_holds() -> None:
    one = AdaptiveAge(limit=16)
    pipeline(one, latency=12.0, steps=30, worst=6)
    two = AdaptiveAge(limit=16)
    two.load_state_dict(one.state_dict())
    assert pipeline(two, 12.0, 50, worst=6) == pipeline(one, 12.0, 50, worst=6)
    three = AdaptiveAge(limit=2)
    three.load_state_dict(two.state_dict() | {"age": 9})
    assert three.age == 2


def test_a_loss_that_does_not_tell_is_named() -> None:
    with pytest.raises(ConfigError, match="max_policy_age auto needs a loss that tells ess"):
        AdaptiveAge(limit=2).after_step({"time/wait_s": 1.0, "time/step_s": 2.0})
