"""The simulation of scripts/bench/async.py: its parts against sums by hand, and a sixteenth of its job."""

import asyncio
import importlib
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "scripts/bench"))


@pytest.fixture(scope="module")
def bench() -> Any:
    return importlib.import_module("async")  # a keyword


@pytest.fixture(scope="module")
def outcomes(bench: Any) -> dict[str, Any]:
    return bench.simulate_all(quick=True)


def test_hours_pass_in_no_time_and_in_order() -> None:
    from virtual_time import run

    log: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        log.append((name, asyncio.get_running_loop().time()))

    async def scenario() -> None:
        await asyncio.gather(sleeper("long", 86_400), sleeper("short", 3_600), sleeper("none", 0))

    run(scenario())
    assert log == [("none", 0.0), ("short", pytest.approx(3_600)), ("long", pytest.approx(86_400))]

    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="every task waits for another one"):
        run(stuck())


def test_sequences_share_a_generator_and_those_beyond_its_places_wait(bench: Any) -> None:
    """Three places, step time 1 + b: by hand."""
    from async_machines import Decoder
    from virtual_time import run

    costs = replace(bench.CLUSTER, step_s=1.0, sequence_s=1.0, max_sequences=3)

    async def scenario() -> None:
        time, decoder = asyncio.get_running_loop().time, Decoder(costs)
        begun: list[float] = []
        await decoder.decode([10, 20, 30, 10], lambda index: begun.append(time()))
        # 10 steps of three, the fourth takes the place of the first: 10 of three, then the third alone for 10
        assert begun == [0, 0, 0, pytest.approx(40)]
        assert time() == pytest.approx(10 * 4 + 10 * 4 + 10 * 2)

        async def pause() -> None:
            await asyncio.sleep(3)
            decoder.pause()
            await asyncio.sleep(100)
            decoder.resume()

        began = time()
        await asyncio.gather(decoder.decode([10], begun.append), pause())
        assert time() - began == pytest.approx(10 * 2 + 100)

    run(scenario())


def test_the_mean_length_is_that_of_many_draws(bench: Any) -> None:
    lengths, dice = bench.CLUSTER.lengths, Random(0)
    draws = [lengths.draw(dice) for _ in range(200_000)]
    assert statistics.mean(draws) == pytest.approx(lengths.mean, rel=0.01)
    assert sum(n == lengths.max_tokens for n in draws) / len(draws) == pytest.approx(lengths.cut, rel=0.03)


def test_nothing_is_dropped_and_nothing_too_old_is_trained_on(outcomes: dict[str, Any]) -> None:
    for outcome in outcomes.values():
        assert outcome.info.num_dropped == 0
        assert outcome.oldest <= outcome.schedule.limit
        trained = outcome.schedule.steps * outcome.costs.batch_size
        assert outcome.info.num_sampled == trained
        assert sum(counts.total() for counts in outcome.ages) == trained


def test_it_is_as_fast_as_the_pipeline_allows_and_no_faster(bench: Any, outcomes: dict[str, Any]) -> None:
    """Also where generators and trainer are equally fast: a thread for each place gives 0.75 there."""
    for name in (bench.AUTO, bench.AREAL_AUTO):
        outcome = outcomes[name]
        assert 0.95 <= outcome.efficiency <= 1.01
        assert outcome.bounds == sorted(outcome.bounds)
        assert outcome.bounds[-1] < outcome.schedule.limit
    ratios = bench.simulated_ratios(outcomes)
    assert ratios["vs_synchronous"] > 2.77 and ratios["vs_synchronous_on_all_gpus"] > 2.77


def test_each_goal_is_needed(bench: Any) -> None:
    names = ("share_of_ideal", "vs_synchronous")
    good = {name: goal + 0.01 if name.startswith(names) else goal for name, goal in bench.GOALS.items()}
    assert bench.is_met(good)
    for name in bench.GOALS:
        assert not bench.is_met(good | {name: good[name] - 0.02 if name.startswith(names) else 1})
