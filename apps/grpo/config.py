"""Every key of a GRPO run: its default, its unit, and what it must agree with."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from apps.sections import (
    ChaosConfig,
    GeneratorConfig,
    LauncherConfig,
    LoggingConfig,
    OptimizationConfig,
    ServiceConfig,
    Services,
    above_zero,
    at_least,
    check_batch_size,
    check_chaos,
)
from forge.actors.trainer.parallelism import ParallelismOptions
from forge.config import Loaded, load
from forge.errors import ConfigError

DEFAULT_CONFIG = Path(__file__).parent / "smollm2_135m.yaml"


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """Where prompts and their targets come from."""

    path: str = "openai/gsm8k"  # on the Hugging Face hub; or a .jsonl or .parquet file; or reasoning_gym/TASK
    name: str | None = None  # subset of a hub dataset ("main" for gsm8k)
    split: str = "train"  # split of a hub dataset
    streaming: bool = False  # read a hub dataset while training instead of downloading it first
    prompt_column: str = "question"  # column that holds the prompt
    target_column: str = "answer"  # column that holds what the reward compares with
    system_prompt: str | None = None  # put before every prompt by the chat template
    options: dict[str, Any] | None = None  # arguments of a reasoning-gym task

    def __post_init__(self) -> None:
        if self.options and not self.path.startswith("reasoning_gym/"):
            raise ConfigError(
                f"options are arguments of a reasoning-gym task, but dataset.path is {self.path!r}: set "
                "them to null, or choose a path like reasoning_gym/chain_sum"
            )


@dataclass(frozen=True, slots=True)
class TrainingConfig(OptimizationConfig):
    """The optimizer's side of a step, and what it has to do with the generator."""

    batch_size: int = 8  # prompts of one optimizer step over all ranks; each gives grpo.n_samples completions
    sync_interval: int = 1  # optimizer steps between two updates of the generator's weights
    entropy_coef: float = 0.0  # weight of the entropy bonus in the loss, per nat

    def __post_init__(self) -> None:
        OptimizationConfig.__post_init__(self)
        at_least(self, 1, "batch_size", "sync_interval")


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """GRPO itself (arXiv 2402.03300) and the sampling it learns from."""

    n_samples: int = 8  # completions of one prompt, compared with each other
    clip_low: float = 0.2  # the importance ratio is clipped below 1 - clip_low
    clip_high: float = 0.28  # ... and above 1 + clip_high
    beta: float = 0.1  # weight of the KL term towards the reference model, per nat
    agg_type: Literal["fixed_horizon", "token_mean", "sequence_mean"] = "fixed_horizon"  # mean over tokens
    temperature: float = 1.0  # of the sampling
    max_tokens: int = 512  # longest completion, in tokens

    def __post_init__(self) -> None:
        if self.n_samples < 2:
            raise ConfigError(
                f"n_samples must be at least 2, got {self.n_samples}: advantages compare completions of one "
                "prompt"
            )
        if not 0 <= self.clip_low <= 1:
            raise ConfigError(f"clip_low must lie in [0, 1], got {self.clip_low}")
        at_least(self, 0, "clip_high", "beta")
        at_least(self, 1, "max_tokens")
        above_zero(self, "temperature")


@dataclass(frozen=True, slots=True)
class ServicesConfig(Services):
    """The actors of the run."""

    generator: ServiceConfig = field(default_factory=ServiceConfig)  # procs: its tensor-parallel size
    trainer: ServiceConfig = field(default_factory=ServiceConfig)  # procs: all degrees multiplied
    ref_model: ServiceConfig | None = None  # null or left out: no reference model
    reward: ServiceConfig = field(default_factory=ServiceConfig)
    advantages: ServiceConfig = field(default_factory=ServiceConfig)
    dataset: ServiceConfig = field(default_factory=ServiceConfig)
    replay_buffer: ServiceConfig = field(default_factory=ServiceConfig)

    def __post_init__(self) -> None:
        if self.trainer.num_replicas != 1:
            raise ConfigError(
                f"trainer.num_replicas must be 1, got {self.trainer.num_replicas}: there is one trainer; "
                "give it more procs, or set parallelism.data_parallel_replicate_degree"
            )
        for name in ("dataset", "replay_buffer"):
            service: ServiceConfig = getattr(self, name)
            copies = service.num_procs * service.num_replicas
            if copies != 1:
                raise ConfigError(
                    f"{name} must be one process, got {copies}: copies would not share their contents"
                )


@dataclass(frozen=True, slots=True)
class GRPOConfig:
    """A whole run."""

    model: str  # hf://ORG/NAME, ORG/NAME, a local folder, a GGUF file, or pkg://PACKAGE/FILE.gguf
    steps: int = 100  # optimizer steps
    seed: int = 0  # of the order of the data, the sampling and the initialisation
    output_dir: str = "outputs/grpo"  # folder for metrics, the report and the trained model
    rollout_threads: int = 8  # rollouts at a time; each is one prompt with its completions
    max_policy_age: int = 1  # optimizer steps that the policy of an episode may lag behind the trainer
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    grpo: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    parallelism: ParallelismOptions = field(default_factory=ParallelismOptions)
    services: ServicesConfig = field(default_factory=ServicesConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    chaos: ChaosConfig = field(default_factory=ChaosConfig)
    stall_timeout_s: float | None = 1800.0  # seconds in which nothing moves, then the run ends; null: never

    def __post_init__(self) -> None:
        at_least(self, 1, "steps", "rollout_threads")
        at_least(self, 0, "seed", "max_policy_age")
        if self.stall_timeout_s is not None:
            above_zero(self, "stall_timeout_s")
        passes = self.training.gradient_accumulation_steps
        check_batch_size(self.training.batch_size, self.data_parallel_size, passes)
        self._check_lengths()
        check_chaos(self.chaos, self.services.present())
        if self.grpo.beta > 0 and self.services.ref_model is None:
            raise ConfigError(
                f"grpo.beta is {self.grpo.beta}, but there is no reference model: add services.ref_model, or "
                "set grpo.beta to 0"
            )
        if self.max_policy_age < self.training.sync_interval - 1:
            raise ConfigError(
                f"max_policy_age {self.max_policy_age} is too small for training.sync_interval "
                f"{self.training.sync_interval}: the policy is up to {self.training.sync_interval - 1} steps "
                f"old before each update; set max_policy_age to {self.training.sync_interval - 1} or more"
            )

    @property
    def data_parallel_size(self) -> int:
        """Ranks of the trainer that read different data."""
        return self.parallelism.dp_size(self.services.trainer.num_procs, "services.trainer")

    def _check_lengths(self) -> None:
        if self.grpo.max_tokens >= self.training.seq_len:
            raise ConfigError(
                f"grpo.max_tokens {self.grpo.max_tokens} leaves no room for a prompt in training.seq_len "
                f"{self.training.seq_len}: raise seq_len or lower max_tokens"
            )


SHORTHANDS = {f.name: f"services.{f.name}" for f in fields(ServicesConfig)}
"""On the command line `--trainer.procs 4` is short for `--services.trainer.procs 4`."""


def load_config(argv: Sequence[str]) -> Loaded[GRPOConfig]:
    """The configuration that the command line asks for; see `forge.config.load`."""
    return load(GRPOConfig, argv, default_config=DEFAULT_CONFIG, shorthands=SHORTHANDS)
