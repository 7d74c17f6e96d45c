"""The named flavors of torchtitan's registry -> Hugging Face configs of the same functions."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from forge.actors import _titan as titan
from forge.errors import ConfigError

Registry = Mapping[str, Callable[..., Any]]  # flavor -> function of an attention backend -> Decoder.Config

REGISTRIES: dict[str, tuple[Registry, type[PretrainedConfig]]] = {
    "llama3": (titan.llama3_configs, LlamaConfig),
    "qwen3": (titan.qwen3_configs, Qwen3Config),
}
NOT_TAKEN = {
    "deepseek_v3": "multi-head latent attention and mixtures of experts",
    "flux": "diffusion, not language",
    "gpt_oss": "attention sinks and mixtures of experts",
    "kimi_k2_7": "multi-head latent attention and mixtures of experts",
    "muse_glimmer": "a vision encoder",
    "qwen3_5": "linear attention",
}
"""What keeps torchtitan's other models from being computed by the trainer's block."""

SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
)
"""The fields that decide which function a config stands for."""


def flavor_config(name: str, flavor: str) -> PretrainedConfig:
    """The config of a registered flavor.

    Raises ConfigError with what there is for an unknown one, and with the reason for one that the trainer's
    block can't compute exactly.
    """
    if name in NOT_TAKEN:
        raise ConfigError(f"model.name {name!r} can't be trained here: it needs {NOT_TAKEN[name]}")
    if name not in REGISTRIES:
        raise ConfigError(f"model.name must be one of {', '.join(REGISTRIES)}, got {name!r}")
    registry, config_class = REGISTRIES[name]
    if flavor not in registry:
        raise ConfigError(f"model.flavor of {name} must be one of {', '.join(registry)}, got {flavor!r}")
    model = registry[flavor](attn_backend="flex")
    if any(layer.moe is not None for layer in model.layers):
        raise ConfigError(f"{name} {flavor} can't be trained here: its layers are mixtures of experts")
    return config_class(**_fields(model))


def check_agreement(config: PretrainedConfig, name: str, flavor: str, source: str) -> None:
    """Raises ConfigError, naming a field and both values, unless the config is that of the flavor."""
    want = flavor_config(name, flavor)
    for field in SHAPE:
        theirs, ours = _value(config, field), _value(want, field)
        if theirs != ours:
            raise ConfigError(
                f"{source} says {field}={theirs!r}, but torchtitan's {name} {flavor} has {ours!r}: "
                "leave out model.name and model.flavor to take the folder as it is"
            )


def _fields(model: Any) -> dict[str, Any]:
    """torchtitan's Decoder.Config in Hugging Face's words; its layers are all of one shape."""
    layer = model.layers[0]
    attention = layer.attention
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim or model.dim // attention.n_heads,
        "intermediate_size": layer.feed_forward.w1.out_features,
        "rms_norm_eps": model.norm.eps,
        "tie_word_embeddings": model.enable_weight_tying,
        "max_position_embeddings": attention.rope.max_seq_len,
        "rope_parameters": _rope(attention.rope),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _rope(rope: Any) -> dict[str, Any]:
    plain = {"rope_type": "default", "rope_theta": float(rope.theta)}
    if rope.scaling == "none":
        return plain
    assert rope.scaling == "llama", f"no dense flavor has rotary embeddings scaled by {rope.scaling}"
    return {
        **plain,
        "rope_type": "llama3",
        "factor": rope.scaling_factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }


def _value(config: PretrainedConfig, field: str) -> Any:
    if field == "rope_parameters":  # "type" is the old name of rope_type
        rope: dict[str, Any] = config.rope_parameters
        return {key: value for key, value in rope.items() if key != "type" and value is not None}
    return getattr(config, field, None)
