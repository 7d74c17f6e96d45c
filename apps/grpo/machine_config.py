"""The keys of the machines: the engine that samples, the weights on their way to it, the actors."""

from dataclasses import dataclass, field
from typing import Literal

from apps.sections import GeneratorConfig, ServiceConfig, Services, at_least
from forge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PolicyConfig(GeneratorConfig):
    """The engine that samples, and gets new weights meanwhile."""

    # Completions that are in progress then: they go on with a KV cache that is computed anew, or with the one
    # they have, or they end under the old weights while new ones wait.
    in_flight: Literal["recompute", "keep", "finish"] = "recompute"
    # Each request computed by itself, from a seed of its own: what it samples depends on the weights, the
    # prompt and the seed, and on no other request. Slower; with float32 and max_policy_age 0 two runs are
    # equal to the bit
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class WeightsConfig:
    """The weights on their way from the trainer to the generators."""

    # after each update compare log-probabilities of a few texts: metric logprob_gap/mean. Takes the trainer's
    # time to score them, at most 192 tokens, between two steps
    canary: bool = True
    hosts: int | None = None  # that keep the weights and run nothing else; null: they stay on the trainer's

    def __post_init__(self) -> None:
        if self.hosts is not None:
            at_least(self, 1, "hosts")


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
