"""Every key of a GRPO run: its default, its unit, and what it must agree with."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from forge.config import Loaded, load
from forge.errors import ConfigError

DEFAULT_CONFIG = Path(__file__).parent / "smollm2_135m.yaml"
ENGINE_KEYS = {  # arguments of vLLM's engine that are set by a key of ours
    "model": "model",
    "seed": "seed",
    "dtype": "training.dtype",
    "max_model_len": "training.seq_len",
    "tensor_parallel_size": "services.generator.procs",
    "gpu_memory_utilization": "generator.gpu_memory_utilization",
    "enforce_eager": "generator.enforce_eager",
    "max_num_seqs": "generator.max_num_seqs",
    "kv_cache_memory_bytes": "generator.kv_cache_memory_gb",
}


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
class TrainingConfig:
    """The optimizer's side of a step."""

    batch_size: int = 8  # prompts of one optimizer step over all ranks; each gives grpo.n_samples completions
    learning_rate: float = 1e-6  # peak, of AdamW
    warmup_steps: int = 0  # steps over which the learning rate grows from 0
    weight_decay: float = 0.0  # of AdamW, per step and unit of learning rate
    max_grad_norm: float = 1.0  # gradients are scaled down to this global norm
    seq_len: int = 1024  # most tokens of a prompt and one completion
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of all computation; master weights stay float32
    gradient_accumulation_steps: int = 1  # passes that one optimizer step is split into
    sync_interval: int = 1  # optimizer steps between two updates of the generator's weights
    snapshot_every: int = 25  # steps between two snapshots that a killed trainer goes on from; 0: none
    entropy_coef: float = 0.0  # weight of the entropy bonus in the loss, per nat

    def __post_init__(self) -> None:
        _at_least(self, 1, "batch_size", "seq_len", "gradient_accumulation_steps", "sync_interval")
        _at_least(self, 0, "warmup_steps", "weight_decay", "snapshot_every")
        _above_zero(self, "learning_rate", "max_grad_norm")


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
        _at_least(self, 0, "clip_high", "beta")
        _at_least(self, 1, "max_tokens")
        _above_zero(self, "temperature")


@dataclass(frozen=True, slots=True)
class ParallelismConfig:
    """How the trainer's processes share the work; the degrees multiply to their number."""

    tensor_parallel_degree: int = 1  # processes that share every layer
    pipeline_parallel_degree: int = 1  # processes that share the stack of layers
    data_parallel_shard_degree: int = -1  # processes that share the weights (FSDP); -1: what is left
    data_parallel_replicate_degree: int = 1  # full copies of such a group

    def __post_init__(self) -> None:
        _at_least(
            self, 1, "tensor_parallel_degree", "pipeline_parallel_degree", "data_parallel_replicate_degree"
        )
        if self.data_parallel_shard_degree != -1:
            _at_least(self, 1, "data_parallel_shard_degree")
        if self.pipeline_parallel_degree > 1:
            raise ConfigError(
                f"pipeline_parallel_degree {self.pipeline_parallel_degree} is not supported yet: set it to 1"
            )

    def shard_degree(self, num_procs: int) -> int:
        """`data_parallel_shard_degree`, -1 worked out. ConfigError unless all degrees give `num_procs`."""
        others = (
            self.tensor_parallel_degree * self.pipeline_parallel_degree * self.data_parallel_replicate_degree
        )
        shard = self.data_parallel_shard_degree
        if shard == -1 and num_procs % others == 0:
            return num_procs // others
        if shard * others == num_procs:
            return shard
        product = (
            f"tensor {self.tensor_parallel_degree} x pipeline {self.pipeline_parallel_degree} x "
            f"replicate {self.data_parallel_replicate_degree} x shard {shard}"
        )
        if shard == -1:
            raise ConfigError(
                f"services.trainer has {num_procs} processes, but parallelism wants {product} (what is left)"
                f", a multiple of {others}: change services.trainer.procs or a degree"
            )
        raise ConfigError(
            f"services.trainer has {num_procs} processes, but parallelism wants {product} = {shard * others}"
            f": set services.trainer.procs to {shard * others} or change a degree"
        )


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Where and how often one actor runs; the arguments of `ForgeActor.options`."""

    procs: int = 1  # processes of one replica, on each of its hosts
    hosts: int | None = None  # hosts of one replica; null: this one
    num_replicas: int = 1  # copies that share the calls
    with_gpus: bool = False  # one GPU for every process
    mesh_name: str | None = None  # name in logs; null: that of the service
    env: dict[str, str] = field(default_factory=dict)  # environment variables of its processes
    min_replicas: int | None = None  # with max_replicas: the number of replicas follows the queue
    max_replicas: int | None = None  # most replicas
    max_concurrent: int | None = None  # calls that one replica runs at a time; null: all that come
    timeout_s: float | None = None  # deadline of every call, in seconds; null: none
    health_timeout_s: float = 60.0  # seconds without a sign of life after which a replica is replaced

    def __post_init__(self) -> None:
        _at_least(self, 1, "procs", "num_replicas")
        if self.hosts is not None:
            _at_least(self, 1, "hosts")

    @property
    def num_procs(self) -> int:
        """Processes of one replica on all its hosts."""
        return self.procs * (self.hosts or 1)


@dataclass(frozen=True, slots=True)
class ServicesConfig:
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

    def present(self) -> dict[str, ServiceConfig]:
        """The services that run, by name."""
        services = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: service for name, service in services.items() if service is not None}


@dataclass(frozen=True, slots=True)
class GeneratorConfig:
    """The engine that samples (vLLM)."""

    gpu_memory_utilization: float = 0.8  # share of a GPU's memory for weights and KV cache
    enforce_eager: bool = False  # true: no compilation and CUDA graphs; starts a minute sooner, runs slower
    max_num_seqs: int = 256  # most completions in progress at a time
    kv_cache_memory_gb: float | None = None  # KV cache in GB; null: derived
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments of vLLM's engine

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must lie in (0, 1], got {self.gpu_memory_utilization}")
        for name in self.engine:
            if name in ENGINE_KEYS:
                raise ConfigError(f"engine.{name} has its own key: set {ENGINE_KEYS[name]} instead")
        _at_least(self, 1, "max_num_seqs")
        if self.kv_cache_memory_gb is not None:
            _above_zero(self, "kv_cache_memory_gb")


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """Where metrics go beside the console and metrics.jsonl."""

    wandb: bool = False  # log to Weights & Biases (offline with WANDB_MODE=offline)
    project: str = "forge"  # project there
    run_name: str | None = None  # name of the run there; null: chosen by W&B


@dataclass(frozen=True, slots=True)
class ChaosConfig:
    """Processes that are killed during the run, to see that it does not matter."""

    kill: str | None = None  # names of services, separated by commas, or all; null: none
    every_s: float = 60.0  # seconds between two kills, on average
    seed: int = 0  # of the choice

    def __post_init__(self) -> None:
        _above_zero(self, "every_s")

    @property
    def targets(self) -> list[str]:
        """The names in `kill`."""
        return [name.strip() for name in (self.kill or "").split(",") if name.strip()]


@dataclass(frozen=True, slots=True)
class LauncherConfig:
    """The hosts that the services run on."""

    name: Literal["this_host", "local"] = "this_host"  # local: emulated hosts on this machine, to try it out
    num_hosts: int = 1  # how many, with local
    gpus_per_host: int | None = None  # GPUs each of them pretends to have; null: its share of the real ones

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_hosts")
        if self.name == "this_host" and (self.num_hosts != 1 or self.gpus_per_host is not None):
            raise ConfigError(
                f"name this_host is one host with the GPUs it has, but num_hosts is {self.num_hosts} and "
                f"gpus_per_host {self.gpus_per_host}: set launcher.name to local, or leave them out"
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
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    services: ServicesConfig = field(default_factory=ServicesConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    chaos: ChaosConfig = field(default_factory=ChaosConfig)
    stall_timeout_s: float | None = 1800.0  # seconds in which nothing moves, then the run ends; null: never

    def __post_init__(self) -> None:
        _at_least(self, 1, "steps", "rollout_threads")
        _at_least(self, 0, "seed", "max_policy_age")
        if self.stall_timeout_s is not None:
            _above_zero(self, "stall_timeout_s")
        self._check_batch()
        self._check_lengths()
        self._check_chaos()
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
        shard = self.parallelism.shard_degree(self.services.trainer.num_procs)
        return shard * self.parallelism.data_parallel_replicate_degree

    def _check_batch(self) -> None:
        batch_size, passes = self.training.batch_size, self.training.gradient_accumulation_steps
        share = self.data_parallel_size * passes
        if batch_size % share:
            raise ConfigError(
                f"training.batch_size {batch_size} can't be split evenly: {self.data_parallel_size} "
                f"data-parallel ranks x training.gradient_accumulation_steps {passes} = {share}; make it a "
                f"multiple of {share}, for example {-(-batch_size // share) * share}"
            )

    def _check_chaos(self) -> None:
        names = sorted(service.mesh_name or name for name, service in self.services.present().items())
        for target in self.chaos.targets:
            if target not in (*names, "all"):
                raise ConfigError(f"chaos.kill names {target!r}; there are {', '.join(names)}, or all")

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


def _at_least(section: Any, least: int, *names: str) -> None:
    for name in names:
        if getattr(section, name) < least:
            raise ConfigError(f"{name} must be at least {least}, got {getattr(section, name)}")


def _above_zero(section: Any, *names: str) -> None:
    for name in names:
        if getattr(section, name) <= 0:
            raise ConfigError(f"{name} must be above 0, got {getattr(section, name)}")
