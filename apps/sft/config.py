"""Every key of an SFT run: its default, its unit, and what it must agree with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from apps.sections import (
    ChaosConfig,
    CheckpointConfig,
    GeneratorConfig,
    LauncherConfig,
    LoggingConfig,
    OptimizationConfig,
    ServiceConfig,
    Services,
    above_zero,
    at_least,
    check_chaos,
    with_dtype,
)
from forge.actors.trainer.parallelism import ParallelismOptions
from forge.config import Loaded, load
from forge.errors import ConfigError
from forge.runs import LAST

DEFAULT_CONFIG = Path(__file__).parent / "smollm2_135m.yaml"


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """Where conversations come from; see forge.data.chats for their forms."""

    path: str = (
        "HuggingFaceH4/ultrachat_200k"  # on the hub; or a .jsonl or .parquet file; or pkg://PACKAGE/PATH
    )
    name: str | None = None  # subset of a hub dataset
    split: str = "train"  # split of a hub dataset
    prompt_column: str | None = None  # with answer_column: for data without `messages` or `conversations`
    answer_column: str | None = None
    system_prompt: str | None = None  # for conversations without one; null: the chat template decides
    targets: Literal["all", "last"] = "all"  # turns of the assistant that are learnt

    def __post_init__(self) -> None:
        if (self.prompt_column is None) != (self.answer_column is None):
            raise ConfigError(
                f"prompt_column and answer_column go together, got {self.prompt_column!r} and "
                f"{self.answer_column!r}: set both or none"
            )


@dataclass(frozen=True, slots=True)
class TrainingConfig(OptimizationConfig):
    """The optimizer's side of a step."""

    batch_size: int = 16  # conversations of one optimizer step over all ranks
    learning_rate: float = 1e-5  # peak, of AdamW
    seq_len: int = 2048  # tokens of a conversation; what is longer is cut

    def __post_init__(self) -> None:
        OptimizationConfig.__post_init__(self)
        at_least(self, 1, "batch_size")


@dataclass(frozen=True, slots=True)
class ValidationConfig:
    """Conversations that are never trained on."""

    size: int = 256  # how many, chosen by the seed; 0: none
    split: str | None = None  # a split of their own; null: out of the training data
    every: int = 100  # steps between two validations, beside those at the start and the end
    samples: int = 4  # of their questions answered by the generator each time, where there is one
    max_tokens: int = 256  # longest answer, in tokens

    def __post_init__(self) -> None:
        at_least(self, 0, "size", "samples")
        at_least(self, 1, "every", "max_tokens")


@dataclass(frozen=True, slots=True)
class ServicesConfig(Services):
    """The actors of the run."""

    trainer: ServiceConfig = field(default_factory=ServiceConfig)  # procs: all degrees multiplied
    dataset: ServiceConfig = field(default_factory=ServiceConfig)
    generator: ServiceConfig | None = None  # null: no sampled answers; procs: tensor-parallel size

    def __post_init__(self) -> None:
        for name in ("trainer", "dataset"):
            service: ServiceConfig = getattr(self, name)
            if service.num_replicas != 1:
                raise ConfigError(f"{name}.num_replicas must be 1, got {service.num_replicas}")
        if self.dataset.num_procs != 1:
            raise ConfigError(f"dataset must be one process, got {self.dataset.num_procs}")


@dataclass(frozen=True, slots=True)
class SFTConfig:
    """A whole run."""

    model: str  # hf://ORG/NAME, ORG/NAME, a local folder, a GGUF file, or pkg://PACKAGE/FILE.gguf
    epochs: int = 1  # times that the conversations are gone through
    steps: int | None = None  # optimizer steps; null: those that the epochs take
    seed: int = 0  # of the order of the data, the choice of the validation and the sampling
    output_dir: str = "outputs/sft"  # folder for metrics, checkpoints, the report and the trained model
    resume: str | None = None  # the folder of a run to go on with, or "last": the newest in output_dir
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    loss: str | dict[str, Any] = (
        "sft"  # or a class of your own, MODULE.CLASS; or {name: that, ARGUMENT: VALUE}
    )
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallelism: ParallelismOptions = field(default_factory=ParallelismOptions)
    services: ServicesConfig = field(default_factory=ServicesConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    chaos: ChaosConfig = field(default_factory=ChaosConfig)
    stall_timeout_s: float | None = 1800.0  # seconds in which nothing moves, then the run ends; null: never

    def __post_init__(self) -> None:
        at_least(self, 1, "epochs")
        at_least(self, 0, "seed")
        if self.steps is not None:
            at_least(self, 1, "steps")
        if self.stall_timeout_s is not None:
            above_zero(self, "stall_timeout_s")
        if self.training.batch_size < self.data_parallel_size:
            raise ConfigError(
                f"training.batch_size {self.training.batch_size} is less than a conversation for each of "
                f"{self.data_parallel_size} data-parallel ranks: make it {self.data_parallel_size} or more"
            )
        check_chaos(self.chaos, self.present())
        self.make_loss()

    def make_loss(self) -> Callable[..., Any]:
        """The loss that is asked for. Raises ConfigError for one that learns from samples of a policy."""
        from forge.rl.loss import LOSSES, SFTLoss, make_loss  # takes a second: torch

        loss = make_loss(self.loss)
        if type(loss) in {kind for kind, _ in LOSSES.values()} - {SFTLoss}:
            raise ConfigError(
                f"loss {self.loss!r} compares the policy with the one that sampled its data, and no policy "
                "sampled this: set loss to sft, or to a class of your own"
            )
        return loss

    def present(self) -> dict[str, ServiceConfig]:
        """The services that run, by name: no generator where there is no question to answer."""
        services = self.services.present()
        if not (self.validation.size and self.validation.samples):
            services.pop("generator", None)
        return services

    @property
    def data_parallel_size(self) -> int:
        """Ranks of the trainer that read different data."""
        return self.parallelism.dp_size(self.services.trainer.num_procs, "services.trainer")


SHORTHANDS = {f.name: f"services.{f.name}" for f in fields(ServicesConfig)}
"""On the command line `--trainer.procs 4` is short for `--services.trainer.procs 4`."""


def load_config(argv: Sequence[str]) -> Loaded[SFTConfig]:
    """The configuration that the command line asks for; see `forge.config.load`."""
    loaded = load(
        SFTConfig, argv, default_config=DEFAULT_CONFIG, shorthands=SHORTHANDS, alone={"resume": LAST}
    )
    config = loaded.config
    return replace(
        loaded, config=replace(config, training=with_dtype(config.training, config.services.trainer))
    )
