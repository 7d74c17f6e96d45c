"""Low-rank adapters by torchtitan's LoRAConverter: names, first values, and weights with them merged in."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge.actors import _titan as titan
from forge.actors.trainer.checkpoint_files import fill, whole
from forge.actors.trainer.lora_options import LORA_LAYERS, LoRAOptions
from forge.actors.trainer.source import ModelSource, generator_for
from forge.weights.box import Box, box_of

# torchtitan's configs of LORA_LAYERS; that of k is called `wkv` (see model.QKV)
_CONFIGS: dict[str, str] = dict(zip(LORA_LAYERS, ("wq", "wkv", "wv", "wo", "w1", "w3", "w2"), strict=True))
_A, _B = ".lora_a.weight", ".lora_b.weight"


@dataclass(frozen=True, slots=True)
class Factors:
    """One adapter: its weight computes as W + scale * B A."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]


def with_adapters(model: titan.Qwen3Model.Config, options: LoRAOptions) -> titan.Qwen3Model.Config:
    """The config of the same model with adapters, and all else frozen."""
    targets = [_CONFIGS[name] for name in options.layers]
    converter = titan.LoRAConverter.Config(
        rank=options.rank, alpha=options.alpha, target_modules=targets
    ).build()
    return converter.convert(model)


def is_adapter(name: str) -> bool:
    """Whether a parameter of the model is one of an adapter's factors."""
    return name.endswith((_A, _B))


def factors_of(
    state: Mapping[str, Tensor], to_hf: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Factors]:
    """The live adapters among a model's parameters, by the Hugging Face names of the weights they change."""
    bases = [name.removesuffix(_A) for name in state if name.endswith(_A)]
    return to_hf({f"{base}.weight": Factors(state[base + _A], state[base + _B]) for base in bases})


def draw(adapters: Mapping[str, Factors], seed: int) -> None:
    """First values, the same under every parallel layout: A uniform as `torch.nn.Linear` has it, B zero."""
    for name, factors in adapters.items():
        like = factors.a
        device = like.to_local().device if isinstance(like, DTensor) else like.device
        bound = 1 / math.sqrt(like.shape[1])
        generator = generator_for(_peft_name(name, "A"), device, seed)
        fill(like, torch.empty(like.shape, device=device).uniform_(-bound, bound, generator=generator))
        fill(factors.b, torch.zeros(factors.b.shape, device=device))


class Merge:
    """Weights with their adapters in them, computed in float32 one at a time, so that no second copy of the
    model is held. As of the time it is made, which is a collective: nothing later is one."""

    @torch.no_grad()
    def __init__(self, adapters: Mapping[str, Factors], scale: float) -> None:
        self._scale = scale
        self._factors = {
            name: Factors(whole(f.a).clone(), whole(f.b).clone()) for name, f in adapters.items()
        }

    def part(self, name: str, weight: Tensor, box: Box) -> Tensor:
        """The merged part of a weight, given that part of it and where in the whole it lies."""
        if name not in self._factors:
            return weight
        rows, columns = box.slices
        factors = self._factors[name]
        a, b = factors.a[:, columns].float(), factors.b[rows].float()
        return torch.addmm(weight.float(), b, a, alpha=self._scale)

    def tensor(self, name: str, weight: Tensor) -> Tensor:
        """The whole merged weight, or this process's shard of it."""
        if not isinstance(weight, DTensor):
            return self.part(name, weight, Box.whole(weight.shape))
        local, box = weight.to_local(), box_of(weight)
        return DTensor.from_local(
            local if box is None else self.part(name, local, box),
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )


def peft_tensors(adapters: Mapping[str, Factors]) -> dict[str, Tensor]:
    """The live factors by the names that PEFT stores them under."""
    return {
        _peft_name(name, letter): factor
        for name, factors in adapters.items()
        for letter, factor in (("A", factors.a), ("B", factors.b))
    }


def peft_config(options: LoRAOptions, source: ModelSource) -> dict[str, Any]:
    """PEFT's adapter_config.json: what LoraConfig has no defaults for, and what vLLM reads."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source.name,
        "r": options.rank,
        "lora_alpha": int(options.alpha) if float(options.alpha).is_integer() else options.alpha,
        "target_modules": list(options.layers),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _peft_name(weight: str, letter: str) -> str:
    return f"base_model.model.{weight.removesuffix('.weight')}.lora_{letter}.weight"
