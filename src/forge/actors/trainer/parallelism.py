"""How the trainer's processes share its work: degrees, checked against their number and the model."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forge.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Schedule = Literal["1F1B", "Interleaved1F1B", "GPipe"]
"""1F1B: one stage a process, few activations held. Interleaved1F1B: two stages a process, less waiting."""

DEGREES = {
    "tensor_parallel_degree": "tensor",
    "pipeline_parallel_degree": "pipeline",
    "context_parallel_degree": "context",
    "data_parallel_replicate_degree": "replicate",
}


@dataclass(frozen=True, slots=True)
class ParallelismOptions:
    """The degrees multiply to the number of processes."""

    tensor_parallel_degree: int = 1  # processes that share every layer
    pipeline_parallel_degree: int = 1  # processes that share the stack of layers
    pipeline_parallel_schedule: Schedule = "1F1B"
    context_parallel_degree: int = 1  # processes that share the tokens of every sequence
    data_parallel_shard_degree: int = -1  # processes that share the weights (FSDP); -1: what is left
    data_parallel_replicate_degree: int = 1  # full copies of such a group

    def __post_init__(self) -> None:
        for name in DEGREES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.data_parallel_shard_degree < 1 and self.data_parallel_shard_degree != -1:
            raise ConfigError(
                f"data_parallel_shard_degree must be at least 1, or -1, got {self.data_parallel_shard_degree}"
            )

    @property
    def num_stages(self) -> int:
        """The parts that a pipeline cuts the model into."""
        return self.pipeline_parallel_degree * (1 + (self.pipeline_parallel_schedule == "Interleaved1F1B"))

    def dp_size(self, num_procs: int, owner: str = "the mesh") -> int:
        """The processes, or groups of them, that get a batch of their own; see `shard_degree`."""
        return self.shard_degree(num_procs, owner) * self.data_parallel_replicate_degree

    def check(self, num_procs: int) -> None:
        """Raises ConfigError unless the degrees fit this many processes."""
        self.shard_degree(num_procs)

    def shard_degree(self, num_procs: int, owner: str = "the mesh") -> int:
        """`data_parallel_shard_degree`, -1 worked out.

        Raises ConfigError, naming the owner of the processes, unless the degrees multiply to their number.
        """
        others = math.prod(getattr(self, name) for name in DEGREES)
        shard = self.data_parallel_shard_degree
        if shard == -1 and num_procs % others == 0:
            return num_procs // others
        if shard * others == num_procs:
            return shard
        product = " x ".join(f"{word} {getattr(self, name)}" for name, word in DEGREES.items())
        has = f"{owner} has {num_procs} processes, but parallelism wants {product} x shard {shard}"
        if shard == -1:
            raise ConfigError(f"{has} (what is left), a multiple of {others}: change procs or a degree")
        raise ConfigError(f"{has} = {shard * others}: set procs to {shard * others} or change a degree")

    def check_model(self, config: "PretrainedConfig") -> None:
        """Raises ConfigError unless a model of this config.json can be cut like that."""
        num_heads = config.num_attention_heads
        for size, name in (
            (num_heads, "num_attention_heads"),
            (config.num_key_value_heads or num_heads, "num_key_value_heads"),
            (config.intermediate_size, "intermediate_size"),
            (config.vocab_size, "vocab_size"),
        ):
            if size % self.tensor_parallel_degree:
                raise ConfigError(
                    f"tensor_parallel_degree must divide the model's {name}, but {size} is no multiple of "
                    f"{self.tensor_parallel_degree}: choose a divisor of it"
                )
        if self.pipeline_parallel_degree > 1:
            self._check_stages(config)

    def _check_stages(self, config: "PretrainedConfig") -> None:
        if config.tie_word_embeddings:
            raise ConfigError(
                "pipeline_parallel_degree must be 1 for a model with tied embeddings, whose head and "
                f"embedding are one weight, got {self.pipeline_parallel_degree}: share the work by "
                "data_parallel_shard_degree or tensor_parallel_degree instead"
            )
        if self.num_stages > config.num_hidden_layers:
            raise ConfigError(
                f"pipeline_parallel_degree {self.pipeline_parallel_degree} with "
                f"{self.pipeline_parallel_schedule} makes {self.num_stages} stages, but the model has only "
                f"{config.num_hidden_layers} layers: lower it"
            )
