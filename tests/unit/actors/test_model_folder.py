"""Hugging Face folders of every supported family: the same logits as transformers, or a clear refusal."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from forge.errors import AssetError, ConfigError
from tests.integration.trainer_cases import start_reference
from tests.tiny import make_tiny_model, make_tokenizer

SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}


def _make_qwen2(folder: Path) -> Path:
    return _make(folder, Qwen2Config, Qwen2ForCausalLM, tie_word_embeddings=True)


def _make_mistral(folder: Path) -> Path:
    return _make(folder, MistralConfig, MistralForCausalLM, sliding_window=None, head_dim=32)


def _make(folder: Path, config_class: type, model_class: type, **overrides: object) -> Path:
    torch.manual_seed(0)
    config = config_class(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=512,
        intermediate_size=128,
        max_position_embeddings=1024,
        **overrides,
    )
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    model.to(torch.float32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


MODELS = {
    "llama tied": lambda f: make_tiny_model(f, "llama", tied=True),
    "llama, llama3 rope": lambda f: make_tiny_model(
        f,
        "llama",
        rope_parameters={**SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "qwen3 untied": lambda f: make_tiny_model(f, "qwen3", tied=False),
    "qwen3, yarn rope": lambda f: make_tiny_model(
        f, "qwen3", rope_parameters={**SCALED, "rope_type": "yarn"}
    ),
    "qwen2, biases": _make_qwen2,
    "mistral": _make_mistral,
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
