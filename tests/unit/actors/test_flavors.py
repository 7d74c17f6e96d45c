"""Named flavors of torchtitan's registry: the function that torchtitan's own model computes, or a refusal."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models import llama3, qwen3
from transformers import AutoModelForCausalLM

from forge.actors import _titan as titan
from forge.actors.reference_model import ReferenceModel
from forge.actors.trainer import TitanTrainer
from forge.actors.trainer.checkpoint_files import save_weights
from forge.actors.trainer.flavors import REGISTRIES, flavor_config
from forge.actors.trainer.options import ModelOptions
from forge.actors.trainer.source import resolve_model
from forge.errors import ConfigError
from forge.rl.loss import GRPOLoss
from tests.tiny import make_tiny_model, make_tokenizer


class CausalAttention(titan.FlexAttention):
    """torchtitan's own needs a compiler on the CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.FlexAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale, enable_gqa):
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        return attended.transpose(1, 2)


def _registered(spec: titan.ModelSpec, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """torchtitan's model with random weights: its logits, and the weights by Hugging Face names."""
    titan.set_spmd_backend("partial_dtensor")
    layout = titan.ParallelismConfig(spmd_backend="partial_dtensor")
    spec.model.update_from_config(config=SimpleNamespace(parallelism=layout))
    for layer in spec.model.layers:
        layer.attention.inner_attention = CausalAttention.Config()
    model = spec.model.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.init_weights()
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.08, generator=generator)
        logits = model(ids, positions=torch.arange(ids.shape[1]).expand_as(ids), attention_masks=None)
    assert spec.state_dict_adapter is not None
    return logits, spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())


@pytest.mark.parametrize(
    ("name", "registry"), [("llama3", llama3.model_registry), ("qwen3", qwen3.model_registry)]
)
def test_a_flavor_computes_what_the_registered_model_computes(
    name: str, registry: Callable[[str], titan.ModelSpec], tmp_path: Path
) -> None:
    ids = torch.randint(0, 2048, (2, 40), generator=torch.Generator().manual_seed(0))
    want, weights = _registered(registry("debugmodel"), ids)
    flavor_config(name, "debugmodel").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    save_weights(weights.items(), tmp_path)

    async def main() -> Tensor:
        model = {"hf_assets_path": str(tmp_path), "name": name, "flavor": "debugmodel"}
        reference = ReferenceModel(model, training={"seq_len": 64, "dtype": "float32"})
        await reference.setup()
        return await reference.forward(ids, max_req_tokens=1, return_logprobs=False)

    assert want.abs().max() > 1
    assert (asyncio.run(main()) - want[:, :-1]).abs().max() < 1e-4


def test_without_a_folder_the_weights_are_random_and_an_export_loads_in_transformers(tmp_path: Path) -> None:
    ids = torch.randint(0, 2048, (40,), generator=torch.Generator().manual_seed(0))

    async def main() -> list[Tensor]:
        scores = []
        for seed in (7, 7, 8):
            model = {"name": "llama3", "flavor": "debugmodel"}
            trainer = TitanTrainer(model, GRPOLoss(), training={"seq_len": 64, "dtype": "float32"}, seed=seed)
            await trainer.setup()
            scores.append(await trainer.score(ids.tolist()))
            if seed == 8:
                await trainer.export(str(tmp_path))
        return scores

    first, again, other = asyncio.run(main())
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, atol=1e-2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    with torch.no_grad():
        want = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
    assert (other - want).abs().max() < 1e-4


def test_dense_flavors_are_taken_and_others_refused_with_the_reason() -> None:
    taken = {name: [] for name in REGISTRIES}
    for name, (registry, _) in REGISTRIES.items():
        for flavor in registry:
            try:
                flavor_config(name, flavor)
                taken[name].append(flavor)
            except ConfigError as error:
                assert "mixtures of experts" in str(error)
    assert taken["llama3"] == ["debugmodel", "1B", "3B", "8B", "70B", "405B"]
    assert {"0.6B", "1.7B", "4B", "8B", "14B", "32B"} <= set(taken["qwen3"])
    for name, flavor, says in (
        ("deepseek_v3", "16B", "needs multi-head latent attention"),
        ("llama2", "7B", "must be one of llama3, qwen3, got 'llama2'"),
        ("qwen3", "7B", "must be one of .*0.6B, .*got '7B'"),
    ):
        with pytest.raises(ConfigError, match=says):
            flavor_config(name, flavor)


def test_a_folder_of_another_shape_than_its_flavor_is_refused(tmp_path: Path) -> None:
    flavor_config("llama3", "1B").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    options = ModelOptions(str(tmp_path), "llama3", "1B")
    assert resolve_model(options).folder == tmp_path
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["factor"] = 32.0  # as the published Llama 3.2 1B
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"rope_parameters=.*'factor': 32.0.*llama3 1B has .*'factor': 8.0"):
        resolve_model(options)
    make_tiny_model(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match="vocab_size=512, but torchtitan's qwen3 0.6B has 151936"):
        resolve_model(ModelOptions(str(tmp_path), "qwen3", "0.6B"))


def test_a_model_is_a_folder_or_a_flavor() -> None:
    with pytest.raises(ConfigError, match="hf_assets_path is missing"):
        ModelOptions()
    with pytest.raises(ConfigError, match="name and flavor go together, got 'qwen3' and None"):
        ModelOptions("folder", name="qwen3")
