"""A GRPO run whose processes are killed all the time, against the same run left alone.

    .venv/bin/python scripts/bench/chaos.py [--quick] [--kills N] [--seed S]
Every part is real, the model tiny and random. First an undisturbed run, then one in which 100 processes are
killed by SIGKILL, one after the other, spread over every service and actor: generator (2 replicas), reference
model, rewards, advantages, dataset, replay buffer, trainer. Then it counts: episodes lost, episodes trained
twice, calls that failed to the user. Prints what it does and ends with one JSON line.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # for the app and the tiny model

from apps.grpo.config import load_config  # noqa: E402
from apps.grpo.machines import Machines, start  # noqa: E402
from apps.grpo.main import rollout  # noqa: E402
from forge.controller import Runtime  # noqa: E402
from forge.controller.chaos import Chaos, Kill  # noqa: E402
from forge.observability.logs import configure_logging  # noqa: E402
from tests.tiny import make_tiny_model  # noqa: E402

GOALS = {"episodes_lost": 0, "episodes_trained_twice": 0, "calls_failed": 0}


@dataclass
class Count:
    """What a run did, as its own loop saw it."""

    added: list[str] = field(default_factory=list)  # ids of episodes, as they were handed to the buffer
    trained: list[str] = field(default_factory=list)  # ids in the batches that a training step took
    steps: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)  # of calls, as the algorithm saw them
    kills: list[Kill] = field(default_factory=list)
    waiting: int = 0
    dropped: int = 0


class CountingBuffer:
    """The replay buffer, with a note of every episode that goes in."""

    def __init__(self, buffer: Any, count: Count) -> None:
        self.admit, self.sample, self.info = buffer.admit, buffer.sample, buffer.info
        self.add = self
        self._buffer, self._count = buffer, count

    async def call_one(self, *episodes: Any) -> None:
        """`add.call_one`."""
        await self._buffer.add.call_one(*episodes)
        self._count.added += [episode.episode_id for episode in episodes]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="8 kills and few steps")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--every-s", type=float, default=1.0, help="from a replica's return to the next kill")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    configure_logging()
    kills = 8 if args.quick else args.kills
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny", "llama")
        calm = asyncio.run(run(model, num_steps=10 if args.quick else 40))
        print(f"undisturbed: {calm.steps} steps in {calm.seconds:.1f} s", flush=True)
        stormy = asyncio.run(run(model, num_kills=kills, every_s=args.every_s, seed=args.seed))
    Runtime.leave()
    print(json.dumps(report(calm, stormy)))


async def run(
    model: Path, *, num_steps: int | None = None, num_kills: int = 0, every_s: float = 1.0, seed: int = 0
) -> Count:
    """Trains for so many steps, or until all kills are done and every replica is back."""
    config = load_config(
        [
            *("--config", str(ROOT / "apps/grpo/smollm2_135m.yaml"), f"model={model}", f"seed={seed}"),
            *("steps=1000000", "training.batch_size=2", "grpo.n_samples=4", "training.dtype=float32"),
            *("rollout_threads=4", "max_policy_age=1", "generator.num_replicas=2"),
        ]
    ).config
    count = Count()
    async with Runtime(stall_timeout_s=600) as runtime:
        machines = await start(config)
        machines = Machines(**{**_fields(machines), "buffer": CountingBuffer(machines.buffer, count)})
        started = time.monotonic()
        chaos = Chaos(runtime.services, ["all"], every_s=every_s, seed=seed, max_kills=num_kills)
        storm = asyncio.create_task(chaos.run(), name="chaos")
        rollouts = [
            asyncio.create_task(repeat(partial(rollout, machines, config), count), name=f"rollout {i}")
            for i in range(config.rollout_threads)
        ]
        while (num_steps is None or count.steps < num_steps) and (num_steps is not None or not storm.done()):
            await learn(machines, count)
            say(count, chaos, num_kills)
        count.seconds = time.monotonic() - started
        await storm
        for task in rollouts:
            task.cancel()
        await asyncio.gather(*rollouts, return_exceptions=True)
        info = await machines.buffer.info.call_one()
        count.waiting, count.dropped, count.kills = info.num_waiting, info.num_dropped, chaos.kills
    return count


async def repeat(work: Any, count: Count) -> None:
    """Rollouts without end; what the algorithm would have to handle is counted."""
    while True:
        try:
            await work()
        except Exception as error:  # this is what is measured
            count.failures.append(f"{type(error).__name__}: {error}")


async def learn(machines: Machines, count: Count) -> None:
    """One training step, as the app's, with a note of the episodes that it took."""
    try:
        step = count.steps + 1
        inputs, targets = await machines.buffer.sample.call_one(curr_policy_version=step - 1, wait=True)
        await machines.trainer.train_step.call(inputs, targets)
        await machines.trainer.push_weights.call(step)
        await machines.policy.update_weights.fanout(step)
        count.trained += [name for part in targets for name in part.episode_ids]
        count.steps = step
    except Exception as error:  # this is what is measured; without a step there is nothing to go on with
        count.failures.append(f"{type(error).__name__}: {error}")
        raise


def say(count: Count, chaos: Chaos, num_kills: int) -> None:
    """A line every few steps."""
    if count.steps % 10 == 0:
        print(f"step {count.steps}: {len(chaos.kills)} of {num_kills} kills", flush=True)


def report(calm: Count, stormy: Count) -> dict[str, Any]:
    """Figures, goals and whether they are met."""
    trained, added = Counter(stormy.trained), Counter(stormy.added)
    num_lost = len(added) - len(trained) - stormy.waiting - stormy.dropped
    figures = {
        "kills": dict(Counter(kill.service for kill in stormy.kills)),
        "steps": stormy.steps,
        "episodes_added": len(added),
        "episodes_trained": len(trained),
        "episodes_waiting": stormy.waiting,
        "episodes_dropped_stale": stormy.dropped,
        "episodes_lost": abs(num_lost),
        "episodes_trained_twice": sum(n - 1 for n in trained.values()) + sum(n - 1 for n in added.values()),
        "calls_failed": len(stormy.failures),
        "back_after_s": {
            name: respawn_times([k.back_after_s for k in stormy.kills if k.service == name])
            for name in sorted({kill.service for kill in stormy.kills})
        },
        "steps_per_s": round(stormy.steps / stormy.seconds, 3),
        "undisturbed_steps_per_s": round(calm.steps / calm.seconds, 3),
    }
    return {
        "bench": "chaos",
        "figures": figures,
        "ratios": {"steps_per_s": round(figures["steps_per_s"] / figures["undisturbed_steps_per_s"], 3)},
        "goals": GOALS,
        "met": all(figures[name] == goal for name, goal in GOALS.items()),
        "note": "; ".join(stormy.failures[:3]) or "one kill at a time, the next after the replica is back",
    }


def respawn_times(seconds: list[float | None]) -> dict[str, float]:
    """Median and longest, in seconds."""
    there = [s for s in seconds if s is not None]
    return {"median": round(statistics.median(there), 2), "max": round(max(there), 2)} if there else {}


def _fields(machines: Machines) -> dict[str, Any]:
    return {name: getattr(machines, name) for name in Machines.__slots__}


if __name__ == "__main__":
    main()
