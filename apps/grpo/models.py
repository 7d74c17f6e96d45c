"""The models of a GRPO run: where they are, and whether they can be computed as the configuration asks."""

from pathlib import Path

from apps import machines
from apps.grpo.config import GRPOConfig
from apps.grpo.teacher import check_teacher
from apps.sections import ServiceConfig
from forge.actors.trainer.parallelism import ParallelismOptions
from forge.data import assets


def fetch_models(config: GRPOConfig) -> tuple[str, str]:
    """The folders of the model that is trained and of the one that judges it: the same, or the teacher's.

    Raises ConfigError unless they can be computed as the configuration asks.
    """
    folder = assets.fetch(config.model)
    judge = folder if config.teacher is None else assets.fetch(config.teacher)
    check_models(config, folder, judge)
    return str(folder), str(judge)


def check_models(config: GRPOConfig, folder: Path, judge: Path | None) -> None:
    """Raises ConfigError where the model's folder, or the teacher's, does not fit the configuration.

    judge: None where it is not here yet.
    """
    machines.check_model(folder, config.parallelism, config.training.seq_len)
    if config.teacher is not None and judge is not None and config.services.ref_model is not None:
        machines.check_model(judge, sharded(config.services.ref_model), config.training.seq_len)
        check_teacher(judge, folder)


def sharded(service: ServiceConfig) -> ParallelismOptions:
    """The layout of a model that is not trained: its weights are shared out to all processes."""
    return ParallelismOptions(data_parallel_shard_degree=service.num_procs)
