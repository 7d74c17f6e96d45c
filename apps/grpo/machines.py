"""Everything that runs in a GRPO run, and how each is made from the configuration."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from apps import machines
from apps.grpo.actors import (
    CLASSES,
    start_advantages,
    start_buffer,
    start_dataset,
    start_generator,
    start_reference,
    start_reward,
    start_trainer,
)
from apps.grpo.algorithm import Algorithm
from apps.grpo.colocation import COLOCATED, colocated, in_turn
from apps.grpo.config import GRPOConfig
from apps.grpo.models import check_models, fetch_models
from apps.grpo.resume import ResumePoint
from apps.sections import ServiceConfig
from forge.controller import ActorHandle, Runtime, Service
from forge.data_models import Completion
from forge.observability import record
from forge.rl.advantage import has_variance
from forge.rl.checks import Checks
from forge.rl.colocation import Colocation
from forge.rl.staleness import AdaptiveAge

logger = logging.getLogger(__name__)

BEGINNING = ResumePoint()


@dataclass(frozen=True, slots=True)
class Machines:
    """The actors and services of the loop, and what it goes by."""

    algorithm: Algorithm
    checks: Checks
    bound: AdaptiveAge | None  # None: max_policy_age is a number
    dataset: ActorHandle
    policy: Service
    reward: Service
    ref_model: Service | None  # or the teacher
    advantages: Service
    buffer: ActorHandle
    trainer: ActorHandle  # None where only rollouts are made
    colocation: Colocation

    def is_useful(self, number: int, completions: list[Completion], rewards: list[float]) -> bool:
        """Whether there is something to learn from these answers to the question of this number."""
        if not self.checks.group(number, completions, rewards):
            return False
        if has_variance(rewards) or not self.algorithm.recipe.dynamic_sampling:
            return True
        record("reward", zero_variance_groups=1.0)  # `advantages` counts those that are not given up
        return False

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on, and no actor has."""
        bound = None if self.bound is None else self.bound.state_dict()
        return {"algorithm": self.algorithm.state_dict(), "checks": self.checks.state_dict(), "bound": bound}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self.algorithm.load_state_dict(state["algorithm"])
        self.checks.load_state_dict(state["checks"])
        if self.bound is not None:
            self.bound.load_state_dict(state["bound"])


async def start(
    config: GRPOConfig,
    folder: Path | None = None,
    point: ResumePoint = BEGINNING,
    without: Collection[str] = (),
) -> Machines:
    """Starts all machines at once; the first error is raised.

    folder: of the run, for checkpoints, and batches whose step is skipped; None: there are no checkpoints.
    point: where the run goes on. without: fields of Machines that are left out.
    """
    model, judge = await asyncio.to_thread(fetch_models, config)
    config = await asyncio.to_thread(colocated, config)
    if config.colocate:
        logger.warning(COLOCATED)
    if config.weights.hosts is not None:
        await machines.open_weight_store(config.weights.hosts)
    Runtime.current().check_gpus(machines.options_of(CLASSES, running(config)))
    algorithm = config.algorithm()
    starts: dict[str, Callable[[], Awaitable[Any]]] = {
        "dataset": partial(start_dataset, config, model),
        "policy": partial(start_generator, config, model, point.step),
        "reward": partial(start_reward, config),
        "advantages": partial(start_advantages, config, algorithm),
        "buffer": partial(start_buffer, config, algorithm),
        "trainer": partial(start_trainer, config, algorithm, model, folder, point.num_updates),
    }
    if config.services.ref_model is not None:
        starts["ref_model"] = partial(start_reference, config, config.services.ref_model, judge)
    actors: dict[str, Any] = dict.fromkeys(("ref_model", *without))
    for names in in_turn([name for name in starts if name not in without], config):
        started = await asyncio.gather(*(starts[name]() for name in names))
        actors |= dict(zip(names, started, strict=True))
    shared = (actors[name] for name in ("policy", "trainer", "ref_model"))
    colocation = Colocation(*shared, is_on=config.colocate is True)
    return Machines(algorithm, checks_of(config), bound_of(config), **actors, colocation=colocation)


def checks_of(config: GRPOConfig) -> Checks:
    """The invariants of this run."""
    return Checks(
        config.checks,
        max_tokens=config.grpo.max_tokens,
        seq_len=config.training.seq_len,
        max_policy_age=config.age_limit,
        reuse=config.buffer.reuse,
        dtype=config.training.dtype,
        teacher=config.teacher is not None,
    )


def bound_of(config: GRPOConfig) -> AdaptiveAge | None:
    """How far rollouts may run ahead, where that is for the loop to find out."""
    if config.max_policy_age != "auto":
        return None
    return AdaptiveAge(config.staleness.limit, config.training.sync_interval)


def placement(config: GRPOConfig) -> str:
    """A table of where every replica runs and what it takes; models in local folders are checked, too."""
    folder, judge = Path(config.model), Path(config.teacher or config.model)
    if folder.is_dir():
        check_models(config, folder, judge if judge.is_dir() else None)
    config = colocated(config)
    options = machines.options_of(CLASSES, running(config))
    table = machines.placement(config.launcher, options, config.weights.hosts or 0)
    return f"{table}\n{COLOCATED}" if config.colocate else table


def running(config: GRPOConfig) -> dict[str, ServiceConfig]:
    """The services that the run starts."""
    if config.replay is not None:
        return {"trainer": config.services.trainer}
    services = config.services.present()
    if config.rollout_only:
        del services["trainer"]
    return services


def plan(config: GRPOConfig) -> str:
    """What a run would do and where: its algorithm, with all that its keys leave open, and its placement."""
    return f"{config.algorithm().described()}\n\n{placement(config)}"
