"""What a trainer or a reference model can be told: typed, checked, each key in one place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forge.actors.trainer.checkpoint_options import CheckpointOptions
from forge.actors.trainer.lora_options import LoRAOptions
from forge.actors.trainer.parallelism import ParallelismOptions
from forge.errors import ConfigError
from forge.schema import build

MODEL_KEY = "hf_assets_path"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model: its config.json decides everything else.

    name and flavor are one of torchtitan's registry ("qwen3", "1.7B"), which the config.json must agree with.
    Without hf_assets_path they alone decide, and the weights are random, drawn from the seed.
    """

    hf_assets_path: str | None = None  # a folder or any other URI that forge.data.assets.fetch takes
    name: str | None = None
    flavor: str | None = None

    def __post_init__(self) -> None:
        if (self.name is None) != (self.flavor is None):
            raise ConfigError(f"name and flavor go together, got {self.name!r} and {self.flavor!r}")
        if self.hf_assets_path is None and self.name is None:
            raise ConfigError("hf_assets_path is missing: name a folder of weights, or a name with a flavor")


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
    """Linear warm-up, then constant, or a decay that ends at `training.steps`."""

    warmup_steps: int = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_factor: float = 0.0  # what a decay ends at, as a share of optimizer.lr

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        if not 0 <= self.min_lr_factor <= 1:
            raise ConfigError(f"min_lr_factor must be between 0 and 1, got {self.min_lr_factor}")


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How a step is computed."""

    seq_len: int = 2048  # positions of a prompt with one of its completions, in tokens
    # of the computation; auto: bfloat16, or float32 on CPUs without instructions for it
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    gradient_accumulation_steps: int = 1  # micro-batches a step is cut into, where it has that many rows
    max_tokens_per_pass: int | None = None  # tokens of a micro-batch; more micro-batches keep to it
    # what the backward pass computes again instead of keeping it: nothing, cheap operations, or whole layers
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    compile: bool = False  # each layer, by torch.compile: the first steps take longer
    cpu_offload: bool = False  # weights and optimizer state wait in host memory; more than one process
    lora: LoRAOptions | None = None  # adapters are trained and nothing else; a reference model has none
    max_grad_norm: float = 1.0
    steps: int = 1_000_000  # of the whole run; the learning rate schedule needs it
    local_batch_size: int | None = None  # sequences that a rank gets each step; None: as many as come
    # optimizer steps between two snapshots of the state that a replaced trainer starts from; 0: no snapshots,
    # it repeats all steps
    snapshot_every: int = 25
    max_skipped_steps: int = 3  # in a row, for a loss or gradient that is not finite; one more ends the run
    # where their batches are written; None: beside the checkpoints, else they go with the run
    bad_batch_folder: str | None = None

    def __post_init__(self) -> None:
        at_least_one = ("gradient_accumulation_steps", "max_tokens_per_pass", "steps", "local_batch_size")
        for name in ("seq_len", *at_least_one):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        for name in ("snapshot_every", "max_skipped_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.max_grad_norm <= 0:
            raise ConfigError(f"max_grad_norm must be positive, got {self.max_grad_norm}")


@dataclass(frozen=True, slots=True)
class ModelOnlyOptions:
    """All that a model needs that is not trained."""

    model: ModelOptions
    training: TrainingOptions = field(default_factory=TrainingOptions)
    parallelism: ParallelismOptions = field(default_factory=ParallelismOptions)

    def check(self, num_procs: int) -> None:
        """Raises ConfigError unless this many processes can do that."""
        self.parallelism.check(num_procs)
        if self.training.cpu_offload and num_procs == 1:
            raise ConfigError(
                "training.cpu_offload moves the shards of several processes, but there is one: use more, or "
                "set it to false"
            )


@dataclass(frozen=True, slots=True)
class TrainerOptions(ModelOnlyOptions):
    """All that a trainer needs beside its loss."""

    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    lr_scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)

    def __post_init__(self) -> None:
        warmup, steps = self.lr_scheduler.warmup_steps, self.training.steps
        if self.lr_scheduler.decay != "constant" and warmup >= steps:
            raise ConfigError(
                f"lr_scheduler.decay needs steps behind the warm-up, but warmup_steps is {warmup} and "
                f"training.steps {steps}: set training.steps to the length of the run"
            )


def model_options(
    model: Mapping[str, Any] | str | Path, training: Mapping[str, Any], parallelism: Mapping[str, Any]
) -> ModelOnlyOptions:
    """Mappings as a user writes them -> typed options; raises ConfigError naming the key."""
    return build(ModelOnlyOptions, _tree(model, training=training, parallelism=parallelism))


def trainer_options(model: Mapping[str, Any] | str | Path, **sections: Mapping[str, Any]) -> TrainerOptions:
    """The same with the sections of a trainer: optimizer, lr_scheduler, training, parallelism, checkpoint."""
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
