"""Everything that runs in a GRPO run, and how each is made from the configuration."""

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path

from apps import machines
from apps.grpo.config import GRPOConfig
from apps.sections import engine_config, trainer_sections, where
from forge.actors.generator import Generator
from forge.actors.reference_model import ReferenceModel
from forge.actors.replay_buffer import ReplayBuffer
from forge.actors.trainer import TitanTrainer
from forge.controller import ActorHandle, ForgeActor, Runtime, Service
from forge.data import assets
from forge.data.dataset import DatasetActor
from forge.data.rewards import MathReward
from forge.rl.grading import ComputeAdvantages, RewardActor
from forge.rl.loss import GRPOLoss


@dataclass(frozen=True, slots=True)
class Machines:
    """The actors and services of the loop."""

    dataset: ActorHandle
    policy: Service
    reward: Service
    ref_model: Service | None
    advantages: Service
    buffer: ActorHandle
    trainer: ActorHandle


async def start(config: GRPOConfig, bad_batches: Path | None = None) -> Machines:
    """Starts all machines at once; the first error is raised.

    bad_batches: where the trainer writes batches whose step it skips; None: to files that go with the run.
    """
    folder = str(await asyncio.to_thread(assets.fetch, config.model))
    services, training, grpo = config.services, config.training, config.grpo
    model = {"hf_assets_path": folder}
    await asyncio.to_thread(machines.check_model, Path(folder), config.parallelism, config.training.seq_len)
    Runtime.current().check_gpus(machines.options_of(CLASSES, config.services.present()))
    loss = GRPOLoss(
        clip_low=grpo.clip_low,
        clip_high=grpo.clip_high,
        beta=grpo.beta,
        agg_type=grpo.agg_type,
        horizon=grpo.max_tokens,
        entropy_coef=training.entropy_coef,
    )
    sections = trainer_sections(training, config.parallelism, config.steps)
    if bad_batches is not None:
        sections["training"]["bad_batch_folder"] = str(bad_batches.absolute())
    starts = {
        "dataset": DatasetActor.options(**where(services.dataset, "dataset")).as_actor(
            **asdict(config.dataset), tokenizer=folder, seed=config.seed
        ),
        "policy": Generator.options(**where(services.generator, "generator")).as_service(
            engine_config=engine_config(folder, config.generator, services.generator, training),
            sampling_config={
                "n": grpo.n_samples,
                "max_tokens": grpo.max_tokens,
                "temperature": grpo.temperature,
            },
            seed=config.seed,
        ),
        "reward": RewardActor.options(**where(services.reward, "reward")).as_service(
            reward_functions=[MathReward()]
        ),
        "advantages": ComputeAdvantages.options(**where(services.advantages, "advantages")).as_service(),
        "buffer": ReplayBuffer.options(**where(services.replay_buffer, "replay_buffer")).as_actor(
            batch_size=training.batch_size * grpo.n_samples // config.data_parallel_size,
            max_policy_age=config.max_policy_age,
            dp_size=config.data_parallel_size,
            sync_interval=training.sync_interval,
        ),
        "trainer": TitanTrainer.options(**where(services.trainer, "trainer")).as_actor(
            model=model,
            **sections,
            loss=loss,
            seed=config.seed,
        ),
    }
    if services.ref_model is not None:
        starts["ref_model"] = ReferenceModel.options(**where(services.ref_model, "ref_model")).as_service(
            model=model,
            training={name: getattr(training, name) for name in ("seq_len", "dtype", "max_tokens_per_pass")},
            parallelism={"data_parallel_shard_degree": services.ref_model.num_procs},
        )
    started = await asyncio.gather(*starts.values())
    return Machines(**{"ref_model": None, **dict(zip(starts, started, strict=True))})


CLASSES: dict[str, type[ForgeActor]] = {  # of each service
    "generator": Generator,
    "trainer": TitanTrainer,
    "ref_model": ReferenceModel,
    "reward": RewardActor,
    "advantages": ComputeAdvantages,
    "dataset": DatasetActor,
    "replay_buffer": ReplayBuffer,
}


def placement(config: GRPOConfig) -> str:
    """A table of where every replica runs and what it takes; a model in a local folder is checked, too."""
    if Path(config.model).is_dir():
        machines.check_model(Path(config.model), config.parallelism, config.training.seq_len)
    return machines.placement(config.launcher, machines.options_of(CLASSES, config.services.present()))
