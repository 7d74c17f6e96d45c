"""What a trainer can be told about low-rank adapters."""

import math
from dataclasses import dataclass

from forge.errors import ConfigError

LORA_LAYERS: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of attention and MLP, by the names that transformers and PEFT have for them."""


@dataclass(frozen=True, slots=True)
class LoRAOptions:
    """Low-rank adapters (arXiv 2106.09685) are trained in place of the weights W [out, in], which compute as
    W + alpha / rank * B A, with B [out, rank] and A [rank, in]."""

    rank: int = 8
    alpha: float = 16.0
    target_modules: list[str] | None = None  # some of LORA_LAYERS, in every block; None: all of them

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"rank must be at least 1, got {self.rank}")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"alpha must be positive and finite, got {self.alpha}")
        if self.target_modules is not None and not self.target_modules:
            raise ConfigError("target_modules is empty: name layers, or leave it out to adapt all of them")
        for name in self.target_modules or ():
            if name not in LORA_LAYERS:
                raise ConfigError(f"target_modules must be some of {', '.join(LORA_LAYERS)}, got {name!r}")

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that have adapters, in the model's order."""
        chosen = LORA_LAYERS if self.target_modules is None else self.target_modules
        return tuple(name for name in LORA_LAYERS if name in chosen)

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / self.rank
