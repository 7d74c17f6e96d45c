"""Everything that runs in an SFT run, and how each is made from the configuration."""

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path

from apps.sections import engine_config, trainer_sections, where
from apps.sft.config import SFTConfig
from forge.actors.generator import Generator
from forge.actors.trainer import TitanTrainer
from forge.controller import ActorHandle, ForgeActor, Runtime, Service
from forge.controller.launcher import make_launcher
from forge.controller.ledger import Demand
from forge.controller.options import ActorOptions
from forge.controller.placement_table import placement_table
from forge.data import assets
from forge.data.chat_dataset import ChatDataset, ChatSizes, Question
from forge.data_models import TextTrainBatch
from forge.rl.loss import SFTLoss


@dataclass(frozen=True, slots=True)
class Machines:
    """The actors of the loop, and the conversations that are held out."""

    dataset: ActorHandle
    trainer: ActorHandle
    generator: Service | None
    sizes: ChatSizes
    num_steps: int  # of the whole run
    validation: list[list[TextTrainBatch]]  # batches, each with a part for every rank
    questions: list[Question]  # that the generator answers at each validation


async def start(config: SFTConfig, checkpoints: Path) -> Machines:
    """Starts the data, then the trainer and the generator at once; the first error is raised.

    checkpoints: a folder; where it holds a checkpoint, the trainer goes on from it.
    """
    folder = str(await asyncio.to_thread(assets.fetch, config.model))
    Runtime.current().check_gpus(options_of(config))
    dataset = await start_dataset(config, folder)
    sizes: ChatSizes = await dataset.sizes.call_one()
    num_steps = config.steps or -(-config.epochs * sizes.train // config.training.batch_size)
    trainer, generator, validation, questions = await asyncio.gather(
        start_trainer(config, folder, num_steps, checkpoints),
        start_generator(config, folder),
        dataset.validation.call_one(),
        dataset.questions.call_one(config.validation.samples),
    )
    return Machines(dataset, trainer, generator, sizes, num_steps, validation, questions)


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
        loss=SFTLoss(),
        seed=config.seed,
    )


async def start_generator(config: SFTConfig, folder: str) -> Service | None:
    """The engine that answers questions with the weights of the moment."""
    service = config.services.generator
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


def options_of(config: SFTConfig) -> list[ActorOptions]:
    """Where and how often each service of the run is to start."""
    present = config.services.present()
    return [CLASSES[name].options(**where(service, name)) for name, service in present.items()]


def placement(config: SFTConfig) -> str:
    """A table of where every replica runs and what it takes, against what there is."""
    hosts = config.launcher
    launcher = make_launcher(hosts.name, hosts.num_hosts, hosts.gpus_per_host)
    return placement_table(launcher, [Demand.of(options) for options in options_of(config)])
