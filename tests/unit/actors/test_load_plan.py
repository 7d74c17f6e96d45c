"""What the ranks of an engine need of the weights, against what vLLM's own loaders make of them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

from forge.actors._vllm.arguments import engine_args, engine_config
from forge.actors._vllm.load_plan import LoadPlan, whole_where_untiled
from forge.actors._vllm.proof import check_parameter
from forge.actors._vllm.rank_weights import RankWeights
from forge.actors._vllm.swap import can_swap
from forge.errors import WeightsMismatch
from forge.weights import Box, Manifest, Shards
from tests.tiny import make_tiny_model

FOLDERS = ["padded", "tiny_qwen3"]


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, with biases, and a vocabulary that vLLM pads."""
    folder = tmp_path_factory.mktemp("models") / "padded"
    return make_tiny_model(folder, "llama", tied=True, vocab_size=500, attention_bias=True)


class Rank:
    """One rank's part of a model, built as vLLM builds it in that rank's process."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, tp: int, pp: int, rank: int) -> None:
        patch.setattr(parallel_state, "_TP", group(rank % tp, tp))
        patch.setattr(parallel_state, "_PP", group(rank // tp, pp))
        arguments = {"dtype": "float32", "max_model_len": 64, "enforce_eager": True}
        self.args = engine_args(arguments, model=str(folder), seed=0, num_procs=1, executor=None)
        self.checkpoint = load_file(folder / "model.safetensors")
        self.model = self.build()
        self.plan = LoadPlan.of(self.model, {name: tuple(t.shape) for name, t in self.checkpoint.items()})

    def build(self) -> nn.Module:
        self.config = engine_config(self.args)
        model: Any = initialize_model(self.config)
        model.load_weights(iter(self.checkpoint.items()))
        self.loaded = {name: p.detach().clone() for name, p in model.named_parameters()}
        process_weights_after_loading(model, self.config.model_config, torch.device("cpu"))
        return model

    def fetch(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: weights[name][box.slices].clone() for name, box in self.plan.boxes.items()}


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(
        rank_in_group=rank, world_size=size, is_first_rank=rank == 0, is_last_rank=rank == size - 1
    )


def ranks(folder: Path, patch: pytest.MonkeyPatch, tp: int, pp: int) -> Iterator[Rank]:
    for rank in range(tp * pp):
        yield Rank(folder, patch, tp, pp, rank)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_a_plan_says_which_bits_vllm_loads_where(
    folder: str, tp: int, pp: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes = []
    for rank in ranks(request.getfixturevalue(folder), monkeypatch, tp, pp):
        assert not rank.plan.unproven and can_swap(rank.model, rank.plan)
        assert rank.plan.parameters.keys() == rank.loaded.keys()
        fetched = rank.fetch(rank.checkpoint)
        for name, parameter in rank.loaded.items():
            check_parameter(parameter, rank.plan.parameters[name], rank.plan.boxes, fetched)
            parameter.view(-1)[-1] += 1
            with pytest.raises(WeightsMismatch):
                check_parameter(parameter, rank.plan.parameters[name], rank.plan.boxes, fetched)
        boxes.append(rank.plan.boxes)
    shapes = {name: tuple(t.shape) for name, t in rank.checkpoint.items()}
    assert {name for of_rank in boxes for name in of_rank} == set(shapes)
    assert not whole_where_untiled(boxes, shapes)
    if tp > 1:
        assert boxes[0]["model.layers.0.mlp.down_proj.weight"].shape == (64, 128 // tp)


def outputs(model: nn.Module) -> dict[str, Tensor]:
    """What each layer makes of the same input, by which packed weights show."""
    found = {}
    for name, layer in model.named_modules():
        method: Any = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedLinearMethod) or name == "lm_head":
            x = torch.randn(3, layer.input_size_per_partition, generator=torch.Generator().manual_seed(0))
            found[name] = method.apply(layer, x, layer.bias)
        elif name == "model.embed_tokens":
            found[name] = method.embedding(layer, torch.arange(9))
        elif "norm" in name:
            found[name] = layer.weight.clone()
    return found


def weights_of(rank: Rank, *, in_place: bool) -> RankWeights:
    def reload(weights: Iterator[tuple[str, Tensor]]) -> None:
        reload_weights(rank.config, rank.model, weights, None, is_checkpoint_format=True)

    shapes = {name: tuple(tensor.shape) for name, tensor in rank.checkpoint.items()}
    return RankWeights(rank.model, shapes, reload, is_compiled=in_place)


def shards(version: int, rank: Rank, weights: dict[str, Tensor]) -> Shards:
    return Shards(version, Manifest(version, {}, "the test"), rank.fetch(weights), {})


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_weights_are_computed_with_after_they_are_loaded_and_not_before(
    folder: str,
    in_place: bool,
    dtype: torch.dtype,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rank in ranks(request.getfixturevalue(folder), monkeypatch, tp=2, pp=1):
        before = outputs(rank.model)
        held = weights_of(rank, in_place=in_place)
        noise = torch.Generator().manual_seed(1)
        rank.checkpoint = {
            n: torch.randn(t.shape, generator=noise).to(dtype) for n, t in rank.checkpoint.items()
        }
        expected = outputs(rank.build())
        held.stage(shards(7, rank, rank.checkpoint))
        held.prepare(7).result()
        assert all(torch.equal(output, before[name]) for name, output in outputs(rank.model).items())
        held.load(7)
        for name, output in outputs(rank.model).items():
            assert torch.equal(output, expected[name]), name
            assert not torch.equal(output, before[name]), name


def test_what_was_not_loaded_as_it_arrived_is_named(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [rank] = ranks(tiny_qwen3, monkeypatch, 1, 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in rank.checkpoint.items()}
    held = RankWeights(rank.model, shapes, lambda weights: None, is_compiled=True)
    changed = dict(rank.checkpoint)
    changed["model.layers.1.self_attn.k_norm.weight"] = torch.full((32,), 1 + 2**-23)
    held.stage(shards(7, rank, changed))
    with pytest.raises(WeightsMismatch, match="model.layers.1.self_attn.k_norm.weight was not loaded"):
        held.load(7)


def test_a_weight_that_vllm_does_not_pack_is_copied_out_of_the_memory_that_it_arrived_in(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [rank] = ranks(tiny_qwen3, monkeypatch, 1, 1)
    layer: Any = rank.model.get_submodule("model.layers.1.self_attn.o_proj")
    layer._cpu_skip_gemm_dispatch = True
    held, arrived = weights_of(rank, in_place=False), shards(7, rank, rank.checkpoint)
    held.stage(arrived)
    held.prepare(7).result()
    for tensor in arrived.tensors.values():
        tensor.zero_()  # its publisher writes there again
    held.load(7)
    assert torch.equal(layer.weight, rank.checkpoint["model.layers.1.self_attn.o_proj.weight"])


def test_what_vllm_keeps_in_another_form_is_told_and_not_compared(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [rank] = ranks(tiny_qwen3, monkeypatch, 1, 1)
    quantized_name, other = (f"model.layers.{i}.input_layernorm.weight" for i in range(2))
    quantized = rank.model.get_parameter(quantized_name)
    quantized.data = quantized.data.to(torch.float8_e4m3fn)  # of the same shape
    held = weights_of(rank, in_place=True)
    assert (
        "float8_e4m3fn" in held.plan.unproven[quantized_name] and quantized_name not in held.plan.parameters
    )
    assert other in held.plan.parameters and other not in held.plan.unproven
    assert quantized_name in held.plan.boxes, "it is fetched all the same"


class Derived(nn.Module):
    """Keeps something made of another layer's weight, and has none of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        pass


def test_where_one_layer_is_derived_from_another_weights_are_loaded_in_place() -> None:
    plan = LoadPlan({}, {}, {})
    assert can_swap(nn.Sequential(nn.Linear(2, 2), Derived(nn.Identity())), plan)
    assert not can_swap(nn.Sequential(Derived(nn.Linear(2, 2))), plan)


class Odd(nn.Module):
    """Loaders that compute, rearrange, leave out, and share a tensor unevenly."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("computed", "turned", "forgotten", "partial", "fused"):
            self.register_parameter(name, nn.Parameter(torch.zeros(4, 4), requires_grad=False))

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        tensors = dict(weights)
        self.computed.data.copy_(tensors["a"] * 2)
        self.turned.data.copy_(tensors["b"].t())
        self.partial.data[:2].copy_(tensors["c"][:2])
        self.fused.data[:2].copy_(tensors["d"][:2])
        self.fused.data[2:].copy_(tensors["d"][4:6])


def test_what_can_not_be_followed_is_told_and_fetched_whole() -> None:
    model = Odd()
    plan = LoadPlan.of(model, {"a": (4, 4), "b": (4, 4), "c": (4, 4), "d": (8, 4), "e": (4,)})
    assert list(plan.parameters) == ["fused"] and not can_swap(model, plan)
    assert "rearrange b" in plan.unproven["turned"] and "8 of its 16" in plan.unproven["partial"]
    assert "compute" in plan.unproven["computed"] and "0 of its 16" in plan.unproven["forgotten"]
    assert plan.boxes == {
        "a": Box.whole((4, 4)),
        "b": Box.whole((4, 4)),
        "c": Box((0, 0), (2, 4)),
        "d": Box((0, 0), (6, 4)),
    }
    assert whole_where_untiled([plan.boxes], {"a": (4, 4), "b": (4, 4), "c": (4, 4), "d": (8, 4)}) == {
        "c",
        "d",
    }
