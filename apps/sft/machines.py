"""Everything that runs in an SFT run, and how each is made from the configuration."""

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path

from apps import machines
from apps.sections import engine_config, trainer_sections, where
from apps.sft.config import SFTConfig, TrainingConfig
from forge.actors.generator import Generator
from forge.actors.trainer import TitanTrainer
from forge.controller import ActorHandle, ForgeActor, Runtime, Service
from forge.data import assets
from forge.data.chat_dataset import ChatDataset, ChatSizes, Question
from forge.data.rows import Position
from forge.data_models import TextTrainBatch
from forge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Machines:
    """The actors of the loop, and the conversations that are held out."""

    dataset: ActorHandle
    trainer: ActorHandle
    generator: Service | None
    sizes: ChatSizes
    num_steps: int  # of the whole run, at most
    end: Position | None  # in the data, where the run ends; None: by its steps alone
    validation: list[list[TextTrainBatch]]  # batches, each with a part for every rank
    questions: list[Question]  # that the generator answers at each validation


async def start(config: SFTConfig, checkpoints: Path) -> Machines:
    """Starts the data, then the trainer and the generator at once; the first error is raised.

    checkpoints: a folder; where it holds a checkpoint, the trainer goes on from it.
    """
    folder = str(await asyncio.to_thread(assets.fetch, config.model))
    await asyncio.to_thread(machines.check_model, Path(folder), config.parallelism, config.training.seq_len)
    Runtime.current().check_gpus(machines.options_of(CLASSES, config.present()))
    dataset = await start_dataset(config, folder)
    sizes: ChatSizes = await dataset.sizes.call_one()
    num_steps = config.steps or -(-config.epochs * sizes.train // config.training.batch_size)
    check_warmup(config.training, num_steps)
    trainer, generator, validation, questions = await asyncio.gather(
        start_trainer(config, folder, num_steps, checkpoints),
        start_generator(config, folder),
        dataset.validation.call_one(),
        dataset.questions.call_one(config.validation.samples),
    )
    end = Position(config.epochs - 1, sizes.train) if config.steps is None else None
    return Machines(dataset, trainer, generator, sizes, num_steps, end, validation, questions)


def check_warmup(training: TrainingConfig, num_steps: int) -> None:
    """Raises ConfigError where a decay of the learning rate would have no step."""
    if training.lr_decay != "constant" and training.warmup_steps >= num_steps:
        raise ConfigError(
            f"training.warmup_steps {training.warmup_steps} is not below the run's {num_steps} steps: "
            "lower it, give the run more epochs, or set training.lr_decay to constant"
        )


async def start_dataset(config: SFTConfig, folder: str) -> ActorHandle:
    """The conversations."""
    return await ChatDataset.options(**where(config.services.dataset, "dataset")).as_actor(
        **asdict(config.dataset),
        tokenizer=folder,
        seq_len=config.training.seq_len,
        batch_size=config.training.batch_size,
        num_ranks=config.data_parallel_size,
        validation_size=config.validation.size,
        validation_split=config.validation.split,
        seed=config.seed,
    )


async def start_trainer(config: SFTConfig, folder: str, num_steps: int, checkpoints: Path) -> ActorHandle:
    """The model that learns them."""
    return await TitanTrainer.options(**where(config.services.trainer, "trainer")).as_actor(
        model={"hf_assets_path": folder},
        **trainer_sections(config.training, config.parallelism, num_steps),
        checkpoint={"folder": str(checkpoints.absolute()), **asdict(config.checkpoint)},
        loss=config.make_loss(),
        seed=config.seed,
    )


async def start_generator(config: SFTConfig, folder: str) -> Service | None:
    """The engine that answers questions with the weights of the moment."""
    service = config.present().get("generator")
    if service is None:
        return None
    return await Generator.options(**where(service, "generator")).as_service(
        engine_config=engine_config(folder, config.generator, service, config.training),
        sampling_config={"n": 1, "max_tokens": config.validation.max_tokens, "temperature": 0.0},
        seed=config.seed,
    )


CLASSES: dict[str, type[ForgeActor]] = {  # of each service
    "trainer": TitanTrainer,
    "dataset": ChatDataset,
    "generator": Generator,
}


def placement(config: SFTConfig) -> str:
    """A table of where every replica runs and what it takes; a model in a local folder is checked, too."""
    if Path(config.model).is_dir():
        machines.check_model(Path(config.model), config.parallelism, config.training.seq_len)
    return machines.placement(config.launcher, machines.options_of(CLASSES, config.present()))
