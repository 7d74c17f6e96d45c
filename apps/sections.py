"""The sections of a configuration that every app has, and what the actors are given of them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from forge.actors.trainer.lora_options import LoRAOptions
from forge.actors.trainer.parallelism import ParallelismOptions
from forge.errors import ConfigError
from forge.hardware import fast_dtype

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
class OptimizationConfig:
    """The optimizer's side of a step."""

    learning_rate: float = 1e-6  # peak, of AdamW
    warmup_steps: int = 0  # steps over which the learning rate grows from 0
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate, to the last step
    min_lr_factor: float = 0.0  # share of the learning rate that a decay ends at
    weight_decay: float = 0.0  # of AdamW, per step and unit of learning rate
    max_grad_norm: float = 1.0  # gradients are scaled down to this global norm
    seq_len: int = 1024  # most tokens of a sequence
    # Of all computation, master weights stay float32; auto: bfloat16, or float32 on CPUs that are slow at it
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    gradient_accumulation_steps: int = 1  # passes that one optimizer step is split into
    max_tokens_per_pass: int | None = None  # tokens of one pass; null: what gradient_accumulation_steps makes
    activation_checkpoint: Literal["none", "selective", "full"] = (
        "none"  # computed again in the backward pass
    )
    lora: LoRAOptions | None = None  # adapters are trained, and the weights stay; null: the weights are
    compile: bool = False  # each layer, by torch.compile
    cpu_offload: bool = False  # weights and optimizer state wait in host memory
    snapshot_every: int = 25  # steps between two snapshots that a killed trainer goes on from; 0: none
    max_skipped_steps: int = 3  # in a row, whose loss or gradient is not finite; one more ends the run

    def __post_init__(self) -> None:
        at_least(self, 1, "seq_len", "gradient_accumulation_steps")
        at_least(self, 0, "warmup_steps", "weight_decay", "snapshot_every", "max_skipped_steps")
        above_zero(self, "learning_rate", "max_grad_norm")
        if self.max_tokens_per_pass is not None:
            at_least(self, 1, "max_tokens_per_pass")
        if not 0 <= self.min_lr_factor <= 1:
            raise ConfigError(f"min_lr_factor must lie in [0, 1], got {self.min_lr_factor}")


Training = TypeVar("Training", bound=OptimizationConfig)


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Where and how often one actor runs; the arguments of `ForgeActor.options`."""

    procs: int = 1  # processes of one replica, on each of its hosts
    hosts: int | None = None  # hosts of one replica; null: this one
    num_replicas: int = 1  # copies that share the calls
    with_gpus: bool = False  # one GPU for every process
    shares_gpus_with: str | None = None  # name of the service on whose GPUs it runs; null: on its own
    mesh_name: str | None = None  # name in logs; null: that of the service
    env: dict[str, str] = field(default_factory=dict)  # environment variables of its processes
    min_replicas: int | None = None  # with max_replicas: the number of replicas follows the queue
    max_replicas: int | None = None  # most replicas
    max_concurrent: int | None = None  # calls that one replica runs at a time; null: all that come
    timeout_s: float | None = None  # deadline of every call, in seconds; null: none
    health_timeout_s: float = 60.0  # seconds without a sign of life after which a replica is replaced

    def __post_init__(self) -> None:
        at_least(self, 1, "procs", "num_replicas")
        if self.hosts is not None:
            at_least(self, 1, "hosts")

    @property
    def num_procs(self) -> int:
        """Processes of one replica on all its hosts."""
        return self.procs * (self.hosts or 1)


@dataclass(frozen=True, slots=True)
class Services:
    """The actors of a run, each a ServiceConfig or null."""

    def present(self) -> dict[str, ServiceConfig]:
        """The services that run, by name."""
        services = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: service for name, service in services.items() if service is not None}


@dataclass(frozen=True, slots=True)
class GeneratorConfig:
    """The engine that samples (vLLM)."""

    # Share of a GPU's memory for weights and KV cache; null: 0.8, or 0.4 on GPUs that it shares
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False  # true: no compilation and CUDA graphs; starts a minute sooner, runs slower
    max_num_seqs: int = 256  # most completions in progress at a time
    kv_cache_memory_gb: float | None = None  # KV cache in GB; null: derived
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments of vLLM's engine

    def __post_init__(self) -> None:
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must lie in (0, 1], got {self.gpu_memory_utilization}")
        for name in self.engine:
            if name in ENGINE_KEYS:
                raise ConfigError(f"engine.{name} has its own key: set {ENGINE_KEYS[name]} instead")
        at_least(self, 1, "max_num_seqs")
        if self.kv_cache_memory_gb is not None:
            above_zero(self, "kv_cache_memory_gb")


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """Where metrics go beside the console and metrics.jsonl."""

    wandb: bool = False  # log to Weights & Biases (offline with WANDB_MODE=offline)
    project: str = "forge"  # project there
    run_name: str | None = None  # name of the run there; null: chosen by W&B


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What a stopped run goes on from, in the folder `checkpoints` of the run."""

    interval: int = 100  # steps between two; 0: only at the end, or when the run is asked to stop
    keep_latest_k: int = 2  # older ones are deleted

    def __post_init__(self) -> None:
        at_least(self, 0, "interval")
        at_least(self, 1, "keep_latest_k")


@dataclass(frozen=True, slots=True)
class ChaosConfig:
    """Processes that are killed during the run, to see that it does not matter."""

    kill: str | None = None  # names of services, separated by commas, or all; null: none
    every_s: float = 60.0  # seconds between two kills, on average
    seed: int = 0  # of the choice

    def __post_init__(self) -> None:
        above_zero(self, "every_s")

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
        at_least(self, 1, "num_hosts")
        if self.name == "this_host" and (self.num_hosts != 1 or self.gpus_per_host is not None):
            raise ConfigError(
                f"name this_host is one host with the GPUs it has, but num_hosts is {self.num_hosts} and "
                f"gpus_per_host {self.gpus_per_host}: set launcher.name to local, or leave them out"
            )


def check_chaos(chaos: ChaosConfig, services: Mapping[str, ServiceConfig]) -> None:
    """Raises ConfigError unless what is to be killed is a service of the run."""
    names = sorted(service.mesh_name or name for name, service in services.items())
    for target in chaos.targets:
        if target not in (*names, "all"):
            raise ConfigError(f"chaos.kill names {target!r}; there are {', '.join(names)}, or all")


def check_batch_size(
    batch_size: int, data_parallel_size: int, passes: int, *, name: str = "training.batch_size"
) -> None:
    """Raises ConfigError unless a batch is the same number of sequences for every rank and pass."""
    share = data_parallel_size * passes
    if batch_size % share:
        raise ConfigError(
            f"{name} {batch_size} can't be split evenly: {data_parallel_size} data-parallel "
            f"ranks x training.gradient_accumulation_steps {passes} = {share}; make it a multiple of "
            f"{share}, for example {-(-batch_size // share) * share}"
        )


def with_dtype(training: Training, trainer: ServiceConfig) -> Training:
    """The section with the dtype that "auto" comes to; a run that goes on elsewhere keeps it."""
    if training.dtype != "auto":
        return training
    return replace(training, dtype=fast_dtype(on_gpu=trainer.with_gpus))


def where(service: ServiceConfig, name: str) -> dict[str, Any]:
    """A service's keys as arguments of `ForgeActor.options`."""
    return {**asdict(service), "mesh_name": service.mesh_name or name}


def trainer_sections(
    training: OptimizationConfig, parallelism: ParallelismOptions, steps: int
) -> dict[str, dict[str, Any]]:
    """The sections of TitanTrainer that these keys decide."""
    same = (
        *("seq_len", "dtype", "gradient_accumulation_steps", "max_tokens_per_pass", "activation_checkpoint"),
        *("compile", "cpu_offload", "max_grad_norm", "snapshot_every", "max_skipped_steps"),
    )
    return {
        "optimizer": {"name": "AdamW", "lr": training.learning_rate, "weight_decay": training.weight_decay},
        "lr_scheduler": {
            "warmup_steps": training.warmup_steps,
            "decay": training.lr_decay,
            "min_lr_factor": training.min_lr_factor,
        },
        "training": {
            "steps": steps,
            "lora": None if training.lora is None else asdict(training.lora),
            **{name: getattr(training, name) for name in same},
        },
        "parallelism": asdict(parallelism),
    }


def engine_config(
    folder: str, generator: GeneratorConfig, service: ServiceConfig, training: OptimizationConfig
) -> dict[str, Any]:
    """vLLM's arguments: what other keys decide, then what the user sets."""
    is_shared = service.with_gpus and service.shares_gpus_with is not None
    derived: dict[str, Any] = {
        "model": folder,
        "dtype": training.dtype,
        "max_model_len": training.seq_len,
        "tensor_parallel_size": service.num_procs,
        "enforce_eager": generator.enforce_eager,
        "max_num_seqs": generator.max_num_seqs,
        "gpu_memory_utilization": generator.gpu_memory_utilization or (0.4 if is_shared else 0.8),
    }
    if is_shared:
        derived["enable_sleep_mode"] = True
    if generator.kv_cache_memory_gb is not None:
        derived["kv_cache_memory_bytes"] = int(generator.kv_cache_memory_gb * 1e9)
    return {**derived, **generator.engine}


def at_least(section: Any, least: int, *names: str) -> None:
    """Raises ConfigError for the first of these keys that is smaller."""
    for name in names:
        if getattr(section, name) < least:
            raise ConfigError(f"{name} must be at least {least}, got {getattr(section, name)}")


def above_zero(section: Any, *names: str) -> None:
    """Raises ConfigError for the first of these keys that is not above zero."""
    for name in names:
        if getattr(section, name) <= 0:
            raise ConfigError(f"{name} must be above 0, got {getattr(section, name)}")
