"""Recording in many places, draining once, merging by the rule that a name carries."""

import math
import pickle
import random
import threading
import time
from collections.abc import Iterator

import pytest

from forge.observability import phase, record
from forge.observability.metrics import Stat, drain, merge


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    drain()
    yield
    drain()


def test_each_name_is_reduced_by_its_own_rule() -> None:
    for value in (3.0, 1.0, 8.0):
        record("group", plain=value, num_things=value, age_max=value, age_min=value)
    assert merge([drain()]) == {
        "group/age_max": 8.0,
        "group/age_min": 1.0,
        "group/num_things": 12.0,
        "group/plain": 4.0,
    }


def test_the_rule_looks_at_the_name_not_at_the_group() -> None:
    record("num_max", value=1.0)
    record("num_max", value=2.0)
    assert merge([drain()]) == {"num_max/value": 1.5}


def test_draining_empties_the_process() -> None:
    record("a", x=1.0)
    assert set(drain()) == {"a/x"}
    assert drain() == {}
    assert merge([]) == {}


def test_merging_processes_equals_one_process_that_saw_everything() -> None:
    chance = random.Random(0)
    parts, everything = [], []
    for size in (1, 7, 30):  # a mean of means would be another number
        values = [chance.gauss(0, 1) for _ in range(size)]
        for value in values:
            record("g", mean=value, num_of=value, of_max=value, of_min=value)
        parts.append(pickle.loads(pickle.dumps(drain())))
        everything += values
    merged = merge(parts)
    assert merged["g/mean"] == pytest.approx(sum(everything) / 38)
    assert merged["g/num_of"] == pytest.approx(sum(everything))
    assert (merged["g/of_max"], merged["g/of_min"]) == (max(everything), min(everything))


def test_names_that_only_some_processes_have_are_kept() -> None:
    assert merge([{"a/x": Stat.of(1.0)}, {}, {"b/y": Stat.of(2.0)}]) == {"a/x": 1.0, "b/y": 2.0}


@pytest.mark.parametrize("order", [(1.0, math.nan), (math.nan, 1.0)])
def test_a_nan_stays_visible_under_every_rule(order: tuple[float, float]) -> None:
    for value in order:
        record("g", x=value, num_x=value, x_max=value, x_min=value)
    assert all(math.isnan(value) for value in merge([drain()]).values())


def test_threads_lose_nothing() -> None:
    def work() -> None:
        for _ in range(2000):
            record("g", num_calls=1.0)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    parts = [drain() for _ in range(50)]
    for thread in threads:
        thread.join()
    assert merge([*parts, drain()]) == {"g/num_calls": 16000.0}


def test_a_phase_records_its_seconds() -> None:
    with phase("train"):
        time.sleep(0.05)
    assert 0.05 <= merge([drain()])["time/train_s"] < 1.0


def test_a_phase_that_raises_records_nothing() -> None:
    with pytest.raises(ValueError, match="broken"), phase("train"):
        raise ValueError("broken")
    assert drain() == {}
