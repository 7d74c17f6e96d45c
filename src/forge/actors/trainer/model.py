"""A Hugging Face config.json -> a torchtitan ModelSpec that computes the same function.

Llama, Qwen2, Qwen3 and Mistral differ in biases, norms and rotary frequencies only, so one block, Qwen3's,
serves all, with rotary embeddings in Hugging Face's layout and separate q, k and v projections: weights are
then renamed, never permuted or cut, under any sharding.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forge.actors._titan import (
    CosSinRoPE,
    Embedding,
    GQAttention,
    Linear,
    ModelSpec,
    QKVLinear,
    Qwen3Model,
    Qwen3StateDictAdapter,
    Qwen3TransformerBlock,
    RMSNorm,
    make_ffn_config,
    parallelize_qwen3,
    pipeline_llm,
    skip_param_init,
)
from forge.actors.trainer.attention import TreeAttention
from forge.actors.trainer.head import TokenHead
from forge.actors.trainer.hf_config import check_hf_config
from forge.actors.trainer.lora import with_adapters
from forge.actors.trainer.lora_options import LoRAOptions

LOADED: dict[str, Any] = {"weight": skip_param_init, "bias": skip_param_init}
"""How weights are initialized: not at all. ModelSource.load fills them, random ones too."""


def model_spec(config: PretrainedConfig, seq_len: int, lora: LoRAOptions | None = None) -> ModelSpec:
    """The torchtitan model of a Hugging Face config, for positions below `seq_len`; with adapters if any are
    asked for.

    Raises ConfigError naming the field where torchtitan's block can't compute what the config asks for.
    """
    check_hf_config(config, seq_len)
    model = Qwen3Model.Config(
        dim=config.hidden_size,
        vocab_size=config.vocab_size,
        enable_weight_tying=bool(config.tie_word_embeddings),
        tok_embeddings=Embedding.Config(
            num_embeddings=config.vocab_size, embedding_dim=config.hidden_size, param_init=LOADED
        ),
        norm=_norm(config, config.hidden_size),
        lm_head=TokenHead.Config(
            in_features=config.hidden_size, out_features=config.vocab_size, param_init=LOADED
        ),
        layers=[_layer(config, seq_len) for _ in range(config.num_hidden_layers)],
    )
    return ModelSpec(
        name=config.model_type,
        flavor=f"{config.num_hidden_layers}x{config.hidden_size}",
        model=model if lora is None else with_adapters(model, lora),
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=HFNames,
    )


def _layer(config: PretrainedConfig, seq_len: int) -> Qwen3TransformerBlock.Config:
    dim, num_heads = config.hidden_size, config.num_attention_heads
    num_kv_heads = config.num_key_value_heads or num_heads
    head_dim = getattr(config, "head_dim", None) or dim // num_heads
    bias = config.model_type == "qwen2"
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(config, dim),
        ffn_norm=_norm(config, dim),
        attention=GQAttention.Config(
            dim=dim,
            n_heads=num_heads,
            n_kv_heads=num_kv_heads,
            head_dim=head_dim,
            qkv_linear=QKV.Config(
                head_dim=head_dim,
                wq=_linear(dim, num_heads * head_dim, bias),
                wkv=_linear(dim, num_kv_heads * head_dim, bias),
                wv=_linear(dim, num_kv_heads * head_dim, bias),
            ),
            wo=_linear(num_heads * head_dim, dim),
            qk_norm=_norm(config, head_dim) if config.model_type == "qwen3" else None,
            inner_attention=TreeAttention.Config(),
            rope=HFRoPE.Config(
                dim=head_dim,
                max_seq_len=seq_len,
                theta=config.rope_parameters["rope_theta"],
                hf_config=config.to_dict(),
            ),
        ),
        feed_forward=make_ffn_config(
            dim=dim, hidden_dim=config.intermediate_size, w1_param_init=LOADED, w2w3_param_init=LOADED
        ),
    )


def _linear(fan_in: int, fan_out: int, bias: bool = False) -> Linear.Config:
    return Linear.Config(in_features=fan_in, out_features=fan_out, bias=bias, param_init=LOADED)


def _norm(config: PretrainedConfig, size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=config.rms_norm_eps, param_init=LOADED)


class QKV(QKVLinear):
    """Projections to q, k and v, each of a config of its own, so that each can have an adapter or none."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        """`wkv` is k's."""

        wv: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.wv.sharding_config = config.wkv.sharding_config  # torchtitan's rules know of `wkv` only
        self.wv = config.wv.build()


class HFRoPE(CosSinRoPE):
    """Rotary embeddings with transformers' own frequencies: every fixed scaling (linear, llama3, yarn) is
    theirs to the bit."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        hf_config: dict[str, Any] = dataclasses.field(default_factory=dict)

    config: Config

    def _precompute_cache(self) -> Tensor:
        """[max_seq_len, 2 * head_dim]: cosines, then sines."""
        config = AutoConfig.for_model(**self.config.hf_config)
        rope_type = config.rope_parameters.get("rope_type", "default")
        dim, theta = self.config.dim, self.config.theta
        if rope_type == "default":
            frequencies = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
            factor = 1.0
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.get_default_device())
        steps = torch.arange(self.config.max_seq_len, dtype=frequencies.dtype, device=frequencies.device)
        angles = torch.outer(steps, frequencies).float()
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1)


class HFNames(Qwen3StateDictAdapter):
    """torchtitan's names <-> Hugging Face's, Qwen2's biases included."""

    def __init__(self, model_config: Qwen3Model.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        for hf, titan in (("q", "wq"), ("k", "wk"), ("v", "wv")):
            hf_name = f"model.layers.{{}}.self_attn.{hf}_proj.bias"
            self.from_hf_map[hf_name] = f"layers.{{}}.attention.qkv_linear.{titan}.bias"
