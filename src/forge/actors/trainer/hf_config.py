"""What a Hugging Face config.json asks for, and whether the trainer computes exactly that."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from forge.errors import AssetError, ConfigError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies are the same for every length of text."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "bias": (False, None),
    "mlp_bias": (False, None),
    "qk_norm": (False, None),
    "attention_dropout": (0, None),
    "is_causal": (True, None),
    "is_heterogeneous": (False, None),
    "rope_interleaved": (False, None),
    "attention_multiplier": (None,),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logit_scale": (1, None),
    "logits_scaling": (1, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
}
"""Fields that change what a model computes, in transformers or vLLM, with the values that change nothing."""

BY_FAMILY: dict[str, tuple[str, ...]] = {"qwen2": ("attention_bias",), "qwen3": ("qk_norm",)}
"""Fields that a family does not read: Qwen2 always has biases at q, k and v, Qwen3 always norms q and k."""


def read_hf_config(folder: Path) -> PretrainedConfig:
    """The config.json of a model folder. Raises AssetError without one, ConfigError for an unknown type."""
    path = folder / "config.json"
    if not path.is_file():
        raise AssetError(f"a model folder must hold config.json, {folder} does not")
    raw = json.loads(path.read_text())
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"model_type in {path} must be one of {', '.join(MODEL_TYPES)}, got {model_type!r}: "
            "choose a model of one of these families"
        )
    try:
        return AutoConfig.for_model(**raw)
    except (StrictDataclassError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"transformers can't read {path}: {error}") from error


def check_hf_config(config: PretrainedConfig, seq_len: int) -> None:
    """Raises ConfigError naming the first field that can't be followed for texts of `seq_len` tokens."""
    for field, value, need in _obstacles(config, seq_len):
        raise ConfigError(
            f"the trainer can't compute {field}={value!r} of this {config.model_type} model: it takes {need}"
        )
    if seq_len > config.max_position_embeddings:
        raise ConfigError(
            f"training.seq_len is {seq_len}, but the model takes at most {config.max_position_embeddings} "
            "positions: lower it"
        )


def _obstacles(config: PretrainedConfig, seq_len: int) -> Iterator[tuple[str, Any, str]]:
    """(field, its value, what would do) of all that can't be computed exactly."""
    for field, neutral in NEUTRAL.items():
        value = getattr(config, field, neutral[0])
        if value not in neutral and field not in BY_FAMILY.get(config.model_type, ()):
            yield field, value, f"{field}: {json.dumps(neutral[0])}"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % (kv_heads or heads):
        yield "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})"
    yield from _windows(config, seq_len)
    yield from _rotary(config)


def _windows(config: PretrainedConfig, seq_len: int) -> Iterator[tuple[str, Any, str]]:
    """A window that no text reaches the end of is full attention."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        yield "layer_types", sorted(kinds), "full_attention in every layer"
    if config.model_type.startswith("qwen"):
        windowed = "sliding_attention" in kinds
    else:  # the others have one window for all layers
        windowed = bool(getattr(config, "sliding_window", None) or "sliding_attention" in kinds)
    window = getattr(config, "sliding_window", None)
    if windowed and (window is None or window < seq_len):
        yield "sliding_window", window, f"null, or at least training.seq_len ({seq_len})"


def _rotary(config: PretrainedConfig) -> Iterator[tuple[str, Any, str]]:
    rope: dict[str, Any] = config.rope_parameters
    if any(isinstance(value, dict) for value in rope.values()):
        yield "rope_parameters", rope, "the same ones for every layer"
        return
    kind = rope.get("rope_type", "default")
    if kind not in FIXED_ROPE_TYPES:
        yield "rope_type", kind, f"frequencies that don't depend on the text: {', '.join(FIXED_ROPE_TYPES)}"
    part = rope.get("partial_rotary_factor", 1.0)
    if part != 1.0:
        yield "partial_rotary_factor", part, "partial_rotary_factor: 1.0"
