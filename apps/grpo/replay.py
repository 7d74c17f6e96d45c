"""Training on recorded episodes: the trainer alone, under whatever layout, without generators or rewards."""

import asyncio
from pathlib import Path
from statistics import fmean

from apps import machines
from apps.grpo.actors import CLASSES, start_trainer
from apps.grpo.config import GRPOConfig
from apps.grpo.models import fetch_models
from forge.app import Run
from forge.controller import ActorHandle, Runtime
from forge.observability import phase, record
from forge.rl.arrange import arrange_minibatches
from forge.rl.minibatches import updates
from forge.rl.record import Recorded, files, read, steps


async def replay(config: GRPOConfig, run: Run) -> None:
    """A step for each recorded one, up to `steps`; the trained model ends as a Hugging Face folder.

    Batches, advantages and reference log-probabilities are those of the record. With the configuration of the
    run that recorded them, in float32 on one process, losses and weights are that run's, to the bit. Steps
    have their numbers of the record; checkpoints are for `forge replay`.
    """
    assert config.replay is not None, "main asks first"
    recorded = files(Path(config.replay))[: config.steps]  # what is not there is told before anything starts
    trainer = await start_only_trainer(config, run.folder)
    run.started(steps=steps(recorded[-1])[0])
    for file in recorded:
        [each] = read(file)
        with phase("train"):
            await learn(trainer, config, each)
        if config.checkpoint.interval and each.step % config.checkpoint.interval == 0:
            await trainer.save_checkpoint.call({"step": each.step}, wait=False)
        await run.report(each.step)
    await trainer.export.call(str(run.folder / "model"))


async def start_only_trainer(config: GRPOConfig, folder: Path) -> ActorHandle:
    """folder: of the run, for what the trainer writes, and the checkpoints that it begins with."""
    model, _ = await asyncio.to_thread(fetch_models, config)
    Runtime.current().check_gpus(machines.options_of(CLASSES, {"trainer": config.services.trainer}))
    return await start_trainer(config, config.algorithm(), model, folder)


async def learn(trainer: ActorHandle, config: GRPOConfig, recorded: Recorded) -> None:
    """The updates of one recorded step."""
    training = config.training
    batches = arrange_minibatches(recorded.episodes, config.data_parallel_size, training.minibatches)
    loss = config.algorithm().loss
    await updates(
        trainer, batches, epochs=training.ppo_epochs, seed=config.seed, step=recorded.step, loss=loss
    )
    record("recorded", reward=fmean(e.reward for e in recorded.episodes), num_episodes=len(recorded.episodes))
