"""What a trainer or a reference model can be told: typed, checked, each key in one place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forge.errors import ConfigError
from forge.schema import build

MODEL_KEY = "hf_assets_path"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model: its config.json decides everything else."""

    hf_assets_path: str  # a folder or any other URI that forge.data.assets.fetch takes
    name: str | None = None  # for the reader
    flavor: str | None = None  # for the reader


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """Adam with or without decoupled weight decay; its state and the weights it updates are float32."""

    name: Literal["AdamW", "Adam"] = "AdamW"
    lr: float = 1e-6
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ConfigError(f"lr must not be negative, got {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must be two numbers in [0, 1), got {self.betas}")


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Linear warm-up, then constant."""

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps must not be negative, got {self.warmup_steps}")


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How a step is computed."""

    seq_len: int = 2048  # positions of a prompt with one of its completions, in tokens
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the computation
    gradient_accumulation_steps: int = 1  # micro-batches a step is cut into, at most
    max_grad_norm: float = 1.0
    steps: int = 1_000_000  # of the whole run; the learning rate schedule needs it
    local_batch_size: int | None = None  # sequences that a rank gets each step; None: as many as come
    # optimizer steps between two snapshots of the state that a replaced trainer starts from; 0: no snapshots,
    # it repeats all steps
    snapshot_every: int = 25

    def __post_init__(self) -> None:
        for name in ("seq_len", "gradient_accumulation_steps", "steps", "local_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.snapshot_every < 0:
            raise ConfigError(f"snapshot_every must not be negative, got {self.snapshot_every}")
        if self.max_grad_norm <= 0:
            raise ConfigError(f"max_grad_norm must be positive, got {self.max_grad_norm}")


@dataclass(frozen=True, slots=True)
class ParallelismOptions:
    """How the processes share the work: the degrees multiply to their number."""

    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    data_parallel_shard_degree: int = -1  # -1: what the other degrees leave
    data_parallel_replicate_degree: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_degree", "pipeline_parallel_degree", "data_parallel_replicate_degree"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.pipeline_parallel_degree > 1:
            raise ConfigError(
                f"pipeline_parallel_degree is {self.pipeline_parallel_degree}, but the trainer can't cut a "
                "model into stages yet: set it to 1"
            )
        if self.data_parallel_shard_degree < 1 and self.data_parallel_shard_degree != -1:
            raise ConfigError(
                f"data_parallel_shard_degree must be at least 1, or -1, got {self.data_parallel_shard_degree}"
            )

    def check(self, world_size: int) -> None:
        """Raises ConfigError unless the degrees fit this many processes."""
        fixed = self.tensor_parallel_degree * self.data_parallel_replicate_degree
        shard = self.data_parallel_shard_degree
        if world_size % fixed or (shard != -1 and fixed * shard != world_size):
            raise ConfigError(
                f"parallelism asks for {fixed}{'' if shard == -1 else f' x {shard}'} processes (tensor x "
                f"replicate x shard), but the mesh has {world_size}: change procs or a degree"
            )


@dataclass(frozen=True, slots=True)
class ModelOnlyOptions:
    """All that a model needs that is not trained."""

    model: ModelOptions
    training: TrainingOptions = field(default_factory=TrainingOptions)
    parallelism: ParallelismOptions = field(default_factory=ParallelismOptions)


@dataclass(frozen=True, slots=True)
class TrainerOptions(ModelOnlyOptions):
    """All that a trainer needs beside its loss."""

    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    lr_scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)


def model_options(
    model: Mapping[str, Any] | str | Path, training: Mapping[str, Any], parallelism: Mapping[str, Any]
) -> ModelOnlyOptions:
    """Mappings as a user writes them -> typed options; raises ConfigError naming the key."""
    return build(ModelOnlyOptions, _tree(model, training=training, parallelism=parallelism))


def trainer_options(model: Mapping[str, Any] | str | Path, **sections: Mapping[str, Any]) -> TrainerOptions:
    """The same with the sections of a trainer: optimizer, lr_scheduler, training, parallelism."""
    return build(TrainerOptions, _tree(model, **sections))


def _tree(model: Mapping[str, Any] | str | Path, **sections: Mapping[str, Any]) -> dict[str, Any]:
    named = dict(model) if isinstance(model, Mapping) else {MODEL_KEY: model}
    if isinstance(named.get(MODEL_KEY), Path):
        named[MODEL_KEY] = str(named[MODEL_KEY])
    tree: dict[str, Any] = {"model": named, **{name: dict(section) for name, section in sections.items()}}
    betas = tree.get("optimizer", {}).get("betas")
    if isinstance(betas, tuple):
        tree["optimizer"]["betas"] = list(betas)
    return tree
