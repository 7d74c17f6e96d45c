"""Every key of a GRPO run: its default, its unit, and what it must agree with."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.grpo.algorithm_config import AlgorithmConfig
from apps.grpo.data_config import DatasetConfig, EvaluationConfig
from apps.grpo.loop_config import BufferConfig, MaxPolicyAge, StalenessConfig, TrainingConfig
from apps.grpo.machine_config import PolicyConfig, ServicesConfig, WeightsConfig
from apps.grpo.teacher import check_teaching
from apps.sections import (
    ChaosConfig,
    CheckpointConfig,
    LauncherConfig,
    LoggingConfig,
    above_zero,
    at_least,
    check_batch_size,
    check_chaos,
    with_dtype,
)
from forge.actors.trainer.parallelism import ParallelismOptions
from forge.config import Loaded, load
from forge.errors import ConfigError
from forge.rl.checks import CheckOptions
from forge.runs import LAST

if TYPE_CHECKING:
    from apps.grpo.algorithm import Algorithm

DEFAULT_CONFIG = Path(__file__).parent / "smollm2_135m.yaml"


@dataclass(frozen=True, slots=True)
class GRPOConfig:
    """A whole run."""

    model: str  # hf://ORG/NAME, ORG/NAME, a local folder, a GGUF file, or pkg://PACKAGE/FILE.gguf
    steps: int = 100  # each trains on one batch
    seed: int = 0  # of the order of the data, the sampling and the initialisation
    output_dir: str = "outputs/grpo"  # folder for metrics, the report and the trained model
    resume: str | None = None  # the folder of a run to go on with, or "last": the newest in output_dir
    record: bool = False  # keep each step's episodes in the folder of the run, for replay
    replay: str | None = None  # folder or file of recorded episodes to train on, without generators
    rollout_only: bool = False  # measure and record rollouts of the model as it is, without a trainer
    colocate: bool | None = None  # all models take turns on the trainer's GPUs; null: if there are too few
    # Rollouts at a time, each one prompt with its completions. Three times as many as fit into the generators
    # (replicas * max_num_seqs / n_samples) keep these full; how far they run ahead is up to max_policy_age
    rollout_threads: int = 8
    # Steps that the policy of an episode may lag behind the trainer. 0: rollouts and steps take turns. auto:
    # as many as keep the batches good to learn from, at most staleness.limit
    max_policy_age: MaxPolicyAge = 1
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    checks: CheckOptions = field(default_factory=CheckOptions)
    loss: str | dict[str, Any] = "grpo"  # a name or a class, MODULE.CLASS; or {name: that, ARGUMENT: VALUE}
    grpo: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    teacher: str | None = None  # a model, in the place of the reference: learnt from instead of the rewards
    parallelism: ParallelismOptions = field(default_factory=ParallelismOptions)
    services: ServicesConfig = field(default_factory=ServicesConfig)
    generator: PolicyConfig = field(default_factory=PolicyConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    chaos: ChaosConfig = field(default_factory=ChaosConfig)
    stall_timeout_s: float | None = 1800.0  # seconds in which nothing moves, then the run ends; null: never

    def __post_init__(self) -> None:
        at_least(self, 1, "steps", "rollout_threads")
        at_least(self, 0, "seed")
        if self.stall_timeout_s is not None:
            above_zero(self, "stall_timeout_s")
        if (hosts := self.weights.hosts) is not None and hosts >= self.launcher.num_hosts:
            raise ConfigError(
                f"weights.hosts {hosts} leaves none of {self.launcher.num_hosts} hosts for the services: set "
                f"launcher.num_hosts to {hosts + 1} or more"
            )
        self._check_parts()
        self._check_lengths()
        self._check_mode()
        check_chaos(self.chaos, self.services.present())
        algorithm = self.algorithm()
        self._check_algorithm(algorithm)
        self._check_age(algorithm.loss)

    @property
    def data_parallel_size(self) -> int:
        """Ranks of the trainer that read different data."""
        return self.parallelism.dp_size(self.services.trainer.num_procs, "services.trainer")

    @property
    def age_limit(self) -> int:
        """Versions that the policy of an episode may be behind the trainer, whatever the loop makes of it."""
        return self.staleness.limit if self.max_policy_age == "auto" else self.max_policy_age

    def algorithm(self) -> "Algorithm":
        """The algorithm that the keys ask for, made anew."""
        from apps.grpo.algorithm import algorithm_of  # takes a second: torch

        return algorithm_of(self.loss, self.grpo, has_teacher=self.teacher is not None)

    def _check_algorithm(self, algorithm: "Algorithm") -> None:
        beta, has_reference = algorithm.beta, self.services.ref_model is not None
        if self.teacher is not None:
            check_teaching(self.grpo, algorithm, has_reference)
        elif beta > 0 and not has_reference:
            raise ConfigError(
                f"the loss has a beta of {beta}, but there is no reference model: add services.ref_model, or "
                "set grpo.beta to 0"
            )
        elif self.grpo.n_samples < 2 and algorithm.recipe.compares:
            raise ConfigError(
                f"grpo.n_samples must be at least 2, got {self.grpo.n_samples}: loss, baseline or dynamic "
                "sampling compare completions of one prompt"
            )

    def _check_age(self, loss: object) -> None:
        interval, limit = self.training.sync_interval, self.age_limit
        if self.max_policy_age == "auto" and not hasattr(loss, "whole_batch_metrics"):
            name = getattr(loss, "__name__", type(loss).__name__)
            raise ConfigError(
                f"max_policy_age auto goes by the ess and logprob_gap of each batch, and loss {name} has no "
                "whole_batch_metrics that tells them: set max_policy_age to a number, or make the loss a "
                "forge.rl.loss.PolicyLoss"
            )
        if self.max_policy_age == "auto" and limit < interval:
            raise ConfigError(
                f"staleness.limit {limit} is below training.sync_interval {interval}: max_policy_age auto "
                "begins with rollouts that far ahead; set it to that or more"
            )
        if limit < 0:
            raise ConfigError(f"max_policy_age must be at least 0, or auto, got {limit}")
        if limit < interval - 1:
            raise ConfigError(
                f"max_policy_age {limit} is too small for training.sync_interval {interval}: the policy is "
                f"up to {interval - 1} steps old before each update; set max_policy_age to {interval - 1} or "
                "more"
            )

        if self.buffer.reuse > limit + 1:
            raise ConfigError(
                f"buffer.reuse {self.buffer.reuse} needs episodes of up to {self.buffer.reuse - 1} steps "
                f"ago, and they may be {limit} old: raise max_policy_age or set it to {limit + 1}"
            )

    def _check_parts(self) -> None:
        training = self.training
        check_batch_size(training.batch_size, self.data_parallel_size, training.gradient_accumulation_steps)
        if training.batch_size % training.minibatches:
            raise ConfigError(
                f"training.batch_size {training.batch_size} can't be split into training.minibatches "
                f"{training.minibatches} equal parts: make it a multiple"
            )
        check_batch_size(
            training.batch_size // training.minibatches,
            self.data_parallel_size,
            training.gradient_accumulation_steps,
            name="training.batch_size / training.minibatches",
        )

    def _check_mode(self) -> None:
        if self.rollout_only and self.replay is not None:
            raise ConfigError(
                "rollout_only trains nothing and replay generates nothing: leave one of them out"
            )
        if self.resume is not None and (self.rollout_only or self.replay is not None):
            raise ConfigError(
                "resume goes on with a run that generates and trains: leave it out with replay and "
                "rollout_only"
            )

    def _check_lengths(self) -> None:
        evaluated = self.evaluation.max_tokens or 0
        if evaluated >= self.training.seq_len:
            raise ConfigError(
                f"evaluation.max_tokens {evaluated} leaves no room for a prompt in training.seq_len "
                f"{self.training.seq_len}: raise seq_len or lower max_tokens"
            )
        if self.grpo.max_tokens >= self.training.seq_len:
            raise ConfigError(
                f"grpo.max_tokens {self.grpo.max_tokens} leaves no room for a prompt in training.seq_len "
                f"{self.training.seq_len}: raise seq_len or lower max_tokens"
            )


SHORTHANDS = {f.name: f"services.{f.name}" for f in fields(ServicesConfig)}
"""On the command line `--trainer.procs 4` is short for `--services.trainer.procs 4`."""


ALIASES = {
    **{f"grpo.{name}": f"loss.{name}" for name in ("clip_low", "clip_high", "beta", "agg_type")},
    "training.entropy_coef": "loss.entropy_coef",
}
"""Other spellings of the loss's arguments, in files and on the command line."""


def load_config(argv: Sequence[str]) -> Loaded[GRPOConfig]:
    """The configuration that the command line asks for; see `forge.config.load`."""
    loaded = load(
        GRPOConfig,
        argv,
        default_config=DEFAULT_CONFIG,
        shorthands=SHORTHANDS,
        aliases=ALIASES,
        alone={"resume": LAST},
    )
    config = loaded.config
    return replace(
        loaded, config=replace(config, training=with_dtype(config.training, config.services.trainer))
    )
