"""Asynchronous against synchronous training: on this machine, and simulated on clusters.

    .venv/bin/python scripts/bench/async.py [--quick] [--only real|simulation] [--steps N] [--rounds N]
Part one trains the default CPU job (apps/grpo/smollm2_135m.yaml) by both schedules, one after the other and
then in the opposite order, and compares samples per second and the reward at equal time. Part two runs the
controller's own code (loops, replay buffer, services, dispatchers, weight synchronization, AdaptiveAge) in
virtual time, with machines that sleep instead of computing (async_costs.py has the costs and where they are
from), and compares throughput with the ideal pipeline and with the synchronous schedule. Once with 256
generators and a trainer of 64 ranks, which is the slower side; once with AReaL's own 96 and 32 GPUs, where
generators and trainer are equally fast and neither may ever wait. Ends with one JSON line. Part one takes
about 10 minutes on two idle cores, part two 8.
"""

import argparse
import json
import time
from dataclasses import replace
from typing import Any

from async_costs import AREAL_RATIO, AREAL_STEP_S, AREAL_SYNCHRONOUS_STEP_S, Costs
from async_simulation import Outcome, Schedule, simulate

GOALS = {
    "share_of_ideal": 0.95,  # at least
    "share_of_ideal_on_areals_gpus": 0.95,
    "num_dropped": 0,
    "versions_beyond_the_bound": 0,  # at most
    "vs_synchronous": AREAL_RATIO,  # above
    "vs_synchronous_on_all_gpus": AREAL_RATIO,
    "vs_synchronous_on_areals_gpus": AREAL_RATIO,
}
NOTE = (
    f"AReaL's {AREAL_RATIO} ({AREAL_SYNCHRONOUS_STEP_S} s to {AREAL_STEP_S} s a step, measured) is of 128 "
    "GPUs: only vs_synchronous_on_areals_gpus is of as many. The costs were fitted to these two times, so "
    "the ideal pipeline there is AReaL's own speed, and that ratio tells how near to it the schedule "
    "comes. The other two are of 256 generators and 64 ranks of a trainer with the same batch, against "
    "the lockstep of the same machines and of 320 that all do both: the more machines, the more of their "
    "time lockstep wastes on the longest answer. steps_in_stock: where it shrinks over the steps that are "
    "counted, generators without time to spare could not go on so for ever. --quick: a sixteenth of all "
    "machines and of the batch."
)

CLUSTER = Costs()
AREAL = replace(CLUSTER, num_generators=96, num_ranks=32)
AUTO, SYNCHRONOUS, ON_ALL = "auto", "synchronous", "synchronous, all GPUs both generate and train"
AREAL_AUTO, AREAL_ON_ALL = "AReaL's GPUs: auto", "AReaL's GPUs: synchronous, all both generate and train"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps, and a sixteenth of each cluster")
    parser.add_argument("--only", choices=["real", "simulation"])
    parser.add_argument("--steps", type=int, help="of each real run")
    parser.add_argument("--rounds", type=int, default=2, help="real runs by each schedule")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    if args.only != "simulation":
        from async_real import compare

        steps = args.steps or (3 if args.quick else 20)
        figures["real"], real = compare(1 if args.quick else args.rounds, steps)
        ratios |= {f"real_{name}": ratio for name, ratio in real.items()}
    if args.only != "real":
        outcomes = simulate_all(quick=args.quick)
        figures["simulation"] = {name: figures_of(outcome) for name, outcome in outcomes.items()}
        ratios |= simulated_ratios(outcomes)
    goals = {} if args.only == "real" else GOALS
    result = {"bench": "async", "figures": figures, "ratios": ratios, "goals": goals}
    print(json.dumps({**result, "met": not goals or is_met(ratios), "note": NOTE}))


def simulate_all(*, quick: bool) -> dict[str, Outcome]:
    """The jobs of part two by name, run one after the other."""
    cluster, areal = (_sixteenth(CLUSTER), _sixteenth(AREAL)) if quick else (CLUSTER, AREAL)
    lockstep = Schedule(0, steps=3, synchronous=True)
    jobs = {
        SYNCHRONOUS: (cluster, lockstep),
        ON_ALL: (_colocated(cluster), lockstep),
        AUTO: (cluster, Schedule("auto", steps=48, warmup=34)),
        AREAL_ON_ALL: (_colocated(areal), lockstep),
        AREAL_AUTO: (areal, Schedule("auto", steps=64, warmup=48)),
    }
    if not quick:
        # Where the age is too small, steps come in rounds of age + 1: whole ones count.
        for age in (1, 4, 8):
            jobs[str(age)] = (cluster, Schedule(age, steps=5 * (age + 1), warmup=2 * (age + 1)))
    outcomes = {}
    for name, (costs, schedule) in jobs.items():
        began = time.perf_counter()
        outcomes[name] = simulate(costs, schedule)
        print(f"{told(name, outcomes[name])}   [{time.perf_counter() - began:.0f} s]", flush=True)
    return outcomes


def _sixteenth(costs: Costs) -> Costs:
    """Of the machines and of the batch."""
    return replace(
        costs,
        num_generators=costs.num_generators // 16,
        num_ranks=costs.num_ranks // 16,
        groups_per_step=costs.groups_per_step // 16,
    )


def _colocated(costs: Costs) -> Costs:
    """As many GPUs as both sides have together generate, and then as many train."""
    num_gpus = costs.num_generators + costs.num_ranks
    return replace(
        costs,
        num_generators=num_gpus,
        tokens_per_rank_s=costs.tokens_per_rank_s * num_gpus / costs.num_ranks,
    )


def figures_of(outcome: Outcome) -> dict[str, Any]:
    """Of one job."""
    assert outcome.info is not None
    return {
        "step_s": round(outcome.step_s, 2),
        "share_of_ideal": round(outcome.efficiency, 4),
        "learner_waits": round(outcome.wait, 4),
        "steps_in_stock": [round(steps, 2) for steps in outcome.stock],
        "bound": outcome.bounds[-1],
        "limit": outcome.schedule.limit,
        "oldest": outcome.oldest,
        "staleness": {age: round(share, 4) for age, share in outcome.staleness.items()},
        "num_dropped": outcome.info.num_dropped,
        "num_sampled": outcome.info.num_sampled,
    }


def told(name: str, outcome: Outcome) -> str:
    assert outcome.info is not None
    shares = " ".join(f"{age}:{share:.0%}" for age, share in outcome.staleness.items())
    return (
        f"{name}: {outcome.step_s:.1f} s a step, {outcome.efficiency:.1%} of ideal; the learner waits "
        f"{outcome.wait:.1%}; rollouts up to {outcome.bounds[-1]} steps ahead; versions behind when trained "
        f"on: {shares}; {outcome.info.num_dropped} dropped"
    )


def simulated_ratios(outcomes: dict[str, Outcome]) -> dict[str, float]:
    """Of the jobs with the bound found by itself, and over all jobs what must be 0."""
    best, areal = outcomes[AUTO], outcomes[AREAL_AUTO]
    return {
        "share_of_ideal": round(best.efficiency, 4),
        "share_of_ideal_on_areals_gpus": round(areal.efficiency, 4),
        "vs_synchronous": round(outcomes[SYNCHRONOUS].step_s / best.step_s, 3),
        "vs_synchronous_on_all_gpus": round(outcomes[ON_ALL].step_s / best.step_s, 3),
        "vs_synchronous_on_areals_gpus": round(outcomes[AREAL_ON_ALL].step_s / areal.step_s, 3),
        "versions_beyond_the_bound": max(0, *(o.oldest - o.schedule.limit for o in outcomes.values())),
        "num_dropped": sum(o.info.num_dropped for o in outcomes.values() if o.info is not None),
    }


def is_met(ratios: dict[str, float]) -> bool:
    """Each ratio against its goal."""
    at_least = [name for name in GOALS if name.startswith("share_of_ideal")]
    above = [name for name in GOALS if name.startswith("vs_synchronous")]
    return (
        all(ratios[name] >= GOALS[name] for name in at_least)
        and all(ratios[name] > GOALS[name] for name in above)
        and all(ratios[name] == 0 for name in ("num_dropped", "versions_beyond_the_bound"))
    )


if __name__ == "__main__":
    main()
