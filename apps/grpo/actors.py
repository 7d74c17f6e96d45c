"""How each actor of a GRPO run is made from the configuration."""

from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from apps.grpo.algorithm import Algorithm
from apps.grpo.config import GRPOConfig
from apps.grpo.models import sharded
from apps.sections import ServiceConfig, engine_config, trainer_sections, where
from forge.actors.generator import Generator, call_seed
from forge.actors.reference_model import ReferenceModel
from forge.actors.replay_buffer import ReplayBuffer
from forge.actors.trainer import TitanTrainer
from forge.controller import ActorHandle, ForgeActor, Service
from forge.data.dataset import DatasetActor
from forge.data.rewards import MathReward
from forge.rl.grading import ComputeAdvantages, RewardActor
from forge.runs import CHECKPOINTS

CLASSES: dict[str, type[ForgeActor]] = {  # of each service
    "generator": Generator,
    "trainer": TitanTrainer,
    "ref_model": ReferenceModel,
    "reward": RewardActor,
    "advantages": ComputeAdvantages,
    "dataset": DatasetActor,
    "replay_buffer": ReplayBuffer,
}


def start_dataset(config: GRPOConfig, model: str) -> Coroutine[Any, Any, ActorHandle]:
    """The questions; those to evaluate by are held out."""
    evaluation = config.evaluation
    names = ("size", "path", "name", "split", "options")
    return DatasetActor.options(**where(config.services.dataset, "dataset")).as_actor(
        **asdict(config.dataset),
        tokenizer=model,
        seed=config.seed,
        held_out={name: getattr(evaluation, name) for name in names} if evaluation.every else None,
    )


def start_generator(config: GRPOConfig, model: str, done: int = 0) -> Coroutine[Any, Any, Service]:
    """The policy. A run that goes on does not draw again what it drew before."""
    service, sampling = config.services.generator, config.grpo
    return Generator.options(**where(service, "generator")).as_service(
        engine_config=engine_config(model, config.generator, service, config.training),
        sampling_config={
            "n": sampling.n_samples,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        },
        seed=config.seed if done == 0 else call_seed(config.seed, done),
        in_flight=config.generator.in_flight,
        deterministic=config.generator.deterministic,
    )


def start_reward(config: GRPOConfig) -> Coroutine[Any, Any, Service]:
    """What grades the answers."""
    return RewardActor.options(**where(config.services.reward, "reward")).as_service(
        reward_functions=[MathReward()]
    )


def start_advantages(config: GRPOConfig, algorithm: Algorithm) -> Coroutine[Any, Any, Service]:
    """What compares the answers of a group."""
    return ComputeAdvantages.options(**where(config.services.advantages, "advantages")).as_service(
        baseline=algorithm.recipe.baseline, normalize=algorithm.recipe.normalize
    )


def start_buffer(config: GRPOConfig, algorithm: Algorithm) -> Coroutine[Any, Any, ActorHandle]:
    """Where episodes wait."""
    num_episodes = config.training.batch_size * config.grpo.n_samples
    return ReplayBuffer.options(**where(config.services.replay_buffer, "replay_buffer")).as_actor(
        batch_size=num_episodes // config.data_parallel_size,
        max_policy_age=config.age_limit,
        dp_size=config.data_parallel_size,
        sync_interval=config.training.sync_interval,
        normalize_advantages=algorithm.recipe.normalize == "batch_std",
        strategy=config.buffer.strategy,
        reuse=config.buffer.reuse,
        num_steps=config.steps,
    )


def start_trainer(
    config: GRPOConfig,
    algorithm: Algorithm,
    model: str,
    folder: Path | None = None,
    load_step: int | None = None,
) -> Coroutine[Any, Any, ActorHandle]:
    """The model that learns, from its newest checkpoint where the folder of the run has one; load_step: from
    that of so many optimizer steps, as a trainer that outlives its run may still complete a later one."""
    num_updates = config.steps * config.training.updates_per_step
    sections = trainer_sections(config.training, config.parallelism, num_updates)
    if folder is not None:
        sections["training"]["bad_batch_folder"] = str((folder / "bad_batches").absolute())
        # the app saves: only it knows what belongs to a step
        checkpoints = str((folder / CHECKPOINTS).absolute())
        kept = config.checkpoint.keep_latest_k
        sections["checkpoint"] = {
            **{"folder": checkpoints, "interval": 0, "keep_latest_k": kept},
            "load_step": load_step,
        }
    return TitanTrainer.options(**where(config.services.trainer, "trainer")).as_actor(
        model={"hf_assets_path": model}, **sections, loss=algorithm.loss, seed=config.seed
    )


def start_reference(config: GRPOConfig, service: ServiceConfig, model: str) -> Coroutine[Any, Any, Service]:
    """What the policy is held to, or the teacher."""
    names = ("seq_len", "dtype", "max_tokens_per_pass")
    return ReferenceModel.options(**where(service, "ref_model")).as_service(
        model={"hf_assets_path": model},
        training={name: getattr(config.training, name) for name in names},
        parallelism=asdict(sharded(service)),
    )
