"""`forge replay`: one recorded step of a run, done again and looked at token by token. Nothing is changed."""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from apps.grpo.config import GRPOConfig, load_config
from apps.grpo.models import fetch_models
from apps.grpo.replay import learn, start_only_trainer
from forge.actors.trainer.checkpoint_folder import CheckpointFolder
from forge.actors.trainer.checkpoint_state import saved_state
from forge.app import METRICS
from forge.controller import ActorHandle, Runtime
from forge.controller.launcher import make_launcher
from forge.data.tokenizer import load_tokenizer
from forge.data_models import ForwardBackwardResult
from forge.errors import ConfigError
from forge.observability.report import read_metrics
from forge.rl.arrange import arrange_minibatches
from forge.rl.loss import PolicyLoss
from forge.rl.minibatches import reads_proximal, update_order, with_proximal
from forge.rl.record import Recorded, read_step, steps
from forge.rl.tokens import TokenRow, table, token_rows
from forge.runs import CHECKPOINTS, CONFIG

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Redone:
    """A step that was done again."""

    started_from: int  # the step whose checkpoint the trainer took; 0: the model
    results: list[ForwardBackwardResult]  # of each update
    rows: list[TokenRow]
    metrics: dict[str, float]  # as the run records them


def replay_step(folder: Path, step: int, *, json_file: Path | None = None, num_tokens: int = 100) -> None:
    """Does step `step` of the run in `folder` again, from the newest checkpoint before it, and prints loss,
    gradient norm and up to `num_tokens` tokens' terms; all of them go to `json_file`.

    Raises ConfigError for a folder or a step that is not there.
    """
    config = read_config(folder)
    recorded = folder if config.replay is None else Path(config.replay)
    read_step(recorded, step)  # one that is not recorded is told before anything starts
    redone = asyncio.run(_run(config, folder, recorded, step))
    before = f"the checkpoint of step {redone.started_from}" if redone.started_from else "the model"
    print(f"step {step} of {folder}, from {before}\n")
    for number, result in enumerate(redone.results, start=1):
        norm = result.metrics.get("grad_norm", float("nan"))
        print(f"update {number} of {len(redone.results)}: loss {result.loss!r}, gradient norm {norm!r}")
    print(f"\n{table(redone.rows[:num_tokens])}")
    if len(redone.rows) > num_tokens:
        print(f"... and {len(redone.rows) - num_tokens} tokens more: see --tokens and --json")
    stored = {row["step"]: row for row in read_metrics(folder / METRICS)}.get(step, {})
    print(f"\n{compared(redone.metrics, stored)}")
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(step, redone, stored), indent=1, ensure_ascii=False))
        print(f"all of it: {json_file}")


def read_config(folder: Path) -> GRPOConfig:
    """That of the run."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"--run is {str(folder)!r}, which is no folder of a run (it has no {CONFIG})")
    return load_config(["--config", str(folder / CONFIG)]).config


async def _run(config: GRPOConfig, folder: Path, recorded: Path, step: int) -> Redone:
    hosts = config.launcher
    launcher = make_launcher(hosts.name, hosts.num_hosts, hosts.gpus_per_host)
    with TemporaryDirectory(prefix="forge-replay-") as scratch:  # the run's own folder is only read
        lend_checkpoint(folder / CHECKPOINTS, Path(scratch) / CHECKPOINTS, before=step)
        async with Runtime(launcher=launcher, stall_timeout_s=config.stall_timeout_s):
            trainer = await start_only_trainer(config, Path(scratch))
            done: int = (await trainer.progress.route()).state.get("step", 0)
            for number in steps_between(config, recorded, done, step):
                logger.info("step %d is done again", number)
                await learn(trainer, config, read_step(recorded, number))
            return await look_at(trainer, config, read_step(recorded, step), done)


def steps_between(config: GRPOConfig, recorded: Path, done: int, step: int) -> list[int]:
    """The steps to do again before this one, after those that the checkpoint has: all that there are. A run
    that replayed a record began with the first of it."""
    if config.replay is None:
        return list(range(done + 1, step))
    return [number for number in steps(recorded) if done < number < step]


def lend_checkpoint(checkpoints: Path, to: Path, *, before: int) -> None:
    """Links the newest whole checkpoint of a step before that one into another folder, which a trainer may
    then do with as it likes."""
    to.mkdir(parents=True)
    own = CheckpointFolder(checkpoints.absolute())
    for num_updates in reversed(own.steps()):
        if own.damage(num_updates) is None and saved_state(own.of(num_updates)).get("step", before) < before:
            (to / own.of(num_updates).name).symlink_to(own.of(num_updates), target_is_directory=True)
            return


async def look_at(trainer: ActorHandle, config: GRPOConfig, recorded: Recorded, started_from: int) -> Redone:
    """The updates of the step, as `forge.rl.minibatches.updates` does them, with each token's terms before
    each of them."""
    training, loss = config.training, config.algorithm().loss
    decode = await asyncio.to_thread(_decoder, config)
    batches = arrange_minibatches(recorded.episodes, config.data_parallel_size, training.minibatches)
    order = update_order(len(batches), training.ppo_epochs, seed=config.seed, step=recorded.step)
    if len(order) > 1 and reads_proximal(loss):
        batches = await with_proximal(trainer, batches)
    await Runtime.current().drain_metrics()  # of the steps before
    rows: list[TokenRow] = []
    results: list[ForwardBackwardResult] = []
    for number, minibatch in enumerate(order, start=1):
        inputs, targets = batches[minibatch]
        logprobs = await trainer.logprobs.route(inputs, targets)
        results.append(await trainer.train_step.route(inputs, targets))
        if isinstance(loss, PolicyLoss):  # one that changes is as it was in the trainer
            loss.beta = results[-1].metrics.get("beta", loss.beta)
        rows += token_rows(loss, targets, logprobs, decode, update=number)
    return Redone(started_from, results, rows, await Runtime.current().drain_metrics())


def _decoder(config: GRPOConfig) -> Any:
    folder, _ = fetch_models(config)
    tokenizer = load_tokenizer(folder)
    return lambda token: tokenizer.decode([token])


def compared(metrics: Mapping[str, float], stored: Mapping[str, float]) -> str:
    """Whether loss and trainer metrics are those that the run wrote down, in one line each where not."""
    both = [name for name in metrics if name.split("/")[0] in ("loss", "trainer") and name in stored]
    if not both:
        return f"{METRICS} has nothing of this step to compare with"
    others = [name for name in both if metrics[name] != stored[name]]
    if not others:
        return f"bit-equal to {METRICS}: {', '.join(both)}"
    told = (
        f"{name} is {metrics[name]!r}, was {stored[name]!r}: {metrics[name] - stored[name]:+.3g}"
        for name in others
    )
    return f"different from {METRICS} in {len(others)} of {len(both)}:\n  " + "\n  ".join(told)


def as_json(step: int, redone: Redone, stored: Mapping[str, float]) -> dict[str, Any]:
    """Everything, as plain data."""
    return {
        "step": step,
        "started_from": redone.started_from,
        "updates": [{"loss": result.loss, **result.metrics} for result in redone.results],
        "metrics": redone.metrics,
        "recorded": dict(stored),
        "tokens": [asdict(row) for row in redone.rows],
    }
