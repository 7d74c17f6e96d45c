"""What engine_config and sampling_config may hold, and what a version of the weights must."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.sampling_params import RequestOutputKind

from forge.actors._vllm.arguments import (
    engine_args,
    engine_config,
    full_kv_cache_nbytes,
    kv_cache_nbytes,
    sampling_params,
)
from forge.actors._vllm.checkpoint import check_weights, tensor_shapes
from forge.actors.generator import Generator, Policy, call_seed, engine_seed
from forge.errors import ConfigError, WeightsMismatch
from forge.weights import TensorFacts

GIB = 1 << 30
CALL_SEED = 4508946950130151931  # of question 1 in a run with seed 0: runs that were killed go on with it


def args_of(config: dict[str, Any], num_procs: int = 1) -> Any:
    return engine_args(config, model="/a/folder", seed=3, num_procs=num_procs, executor=None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_modellen": 9}, "unknown key engine_config.max_modellen: did you mean max_model_len?"),
        ({"zzz": 9}, "unknown key engine_config.zzz: the names are those of vLLM"),
        ({"enable_chunked_prefill": True}, "enable_chunked_prefill must be false on a CPU"),
        ({"seed": 1}, "engine_config.seed is set by the generator: give Generator"),
        ({"logprobs_mode": "raw_logprobs"}, "log-probabilities are always those of the distribution"),
        ({"tensor_parallel_size": 2}, "1 processes, but .* 2 x pipeline_parallel_size 1 = 2: set"),
    ],
)
def test_engine_keys_that_can_not_be_are_named_with_the_fix(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        args_of(config)


def test_the_users_engine_keys_win_over_the_defaults() -> None:
    args = args_of({"max_num_seqs": 7, "tensor_parallel_size": 2, "dtype": "float32"}, num_procs=2)
    assert (args.max_num_seqs, args.tensor_parallel_size, args.dtype) == (7, 2, "float32")
    assert (args.seed, args.model, args.logprobs_mode) == (3, "/a/folder", "processed_logprobs")


def test_values_that_vllm_refuses_are_one_line(tiny_llama: Path) -> None:
    args = engine_args({"dtype": "float33"}, model=str(tiny_llama), seed=0, num_procs=1, executor=None)
    with pytest.raises(
        ConfigError, match="vLLM refuses engine_config: dtype = 'float33': Input should be"
    ) as caught:
        engine_config(args)
    assert "\n" not in str(caught.value)


def test_the_kv_cache_holds_all_sequences_or_a_quarter_of_what_is_free(tiny_llama: Path) -> None:
    config = {"dtype": "float32", "max_model_len": 100, "max_num_seqs": 8, "block_size": 32}
    resolved = engine_config(engine_args(config, model=str(tiny_llama), seed=0, num_procs=1, executor=None))
    token = 2 * 2 * 2 * 32 * 4  # keys and values, 2 layers, 2 heads of size 32, float32
    sequence = token * 32 * 5  # 100 tokens lie in 4 blocks of 32, and one is spare
    assert kv_cache_nbytes(resolved, available=64 * GIB) == 8 * sequence
    assert kv_cache_nbytes(resolved, available=4 * sequence * 3) == 3 * sequence
    assert kv_cache_nbytes(resolved, available=1000) == sequence
    assert resolved.cache_config.kv_cache_memory_bytes == 8 * sequence
    assert full_kv_cache_nbytes(resolved, available=16 * sequence) == 8 * sequence
    with pytest.raises(ConfigError, match="max_num_seqs 8 x max_model_len 100 .* set engine_config.max_num"):
        full_kv_cache_nbytes(resolved, available=15 * sequence)


def test_a_deterministic_generator_compiles_nothing_and_wants_seeds_where_it_samples(
    tiny_llama: Path,
) -> None:
    args = engine_args({"enforce_eager": False}, model=str(tiny_llama), seed=0, num_procs=1, executor=None)
    with pytest.raises(ConfigError, match="drop engine_config.enforce_eager: false"):
        engine_config(args, deterministic=True)
    for sampling in ({"seed": 1}, {"temperature": 0.0}):
        assert sampling_params(sampling, needs_seed=True)
    with pytest.raises(ConfigError, match=r"needs a seed for each call .* generate\(prompt, seed="):
        sampling_params({"temperature": 0.5}, needs_seed=True)


def test_seeds_of_calls_lie_far_apart_and_are_the_same_everywhere() -> None:
    seeds = sorted(call_seed(run, number) for run in range(20) for number in range(500))
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 1_000_000
    assert call_seed(0, 1) == CALL_SEED and call_seed(0, 1) != call_seed(0, 1, 0) != call_seed(1, 0, 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_token": 9}, "unknown key sampling_config.max_token: did you mean max_tokens?"),
        ({"logprobs": 1}, "sampling_config.logprobs is set by the generator"),
        ({"_eos_token_id": 1}, "unknown key sampling_config._eos_token_id"),
        ({"temperature": -1.0}, "vLLM refuses sampling_config: .*temperature"),
        ({"top_p": 0.0}, "vLLM refuses sampling_config: .*top_p"),
        ({"n": "many"}, "vLLM refuses sampling_config: "),
    ],
)
def test_sampling_keys_that_can_not_be_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampling_params(config)


def test_sampling_asks_for_the_sampled_tokens_logprob_and_the_end_only() -> None:
    params = sampling_params({"n": 3, "temperature": 0.7})
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (3, 0.7, 1.0, None)
    assert (params.logprobs, params.output_kind) == (0, RequestOutputKind.FINAL_ONLY)
    assert not params.detokenize and sampling_params({"stop": ["\n"]}).detokenize


def test_engine_seeds_differ_between_replicas_and_runs() -> None:
    seeds = {engine_seed(seed, replica) for seed in range(50) for replica in range(50)}
    assert len(seeds) == 2500
    assert (
        len({engine_seed(0, replica, generation) for replica in range(50) for generation in range(60)})
        == 3000
    )
    assert 0 <= engine_seed(-1, 0) < 2**32 and 0 <= engine_seed(2**40, 7) < 2**32


def test_what_becomes_of_running_requests_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match="in_flight must be one of recompute, keep, finish, got 'drop'"):
        Generator({}, {}, in_flight="drop")


def test_a_policy_is_a_generator() -> None:
    assert Policy is Generator
    assert {"generate", "update_weights", "version"} <= set(Generator.endpoints())


def facts_of(folder: Path) -> dict[str, TensorFacts]:
    return {name: facts(shape) for name, shape in tensor_shapes(folder).items()}


def facts(shape: tuple[int, ...], fingerprint: int = 0) -> TensorFacts:
    return TensorFacts(torch.float32, shape, fingerprint)


def test_the_shapes_of_a_folder_are_those_of_its_model(tiny_qwen3: Path) -> None:
    shapes = tensor_shapes(tiny_qwen3)
    assert shapes["lm_head.weight"] == (512, 64)
    assert shapes["model.layers.1.self_attn.q_norm.weight"] == (32,)
    assert len(shapes) == 25


def test_weights_that_a_folder_holds_once_more_by_other_names_are_none_of_its_model(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_qwen3, folder)
    save_file({"layers.0.attention.wk.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert tensor_shapes(folder) == tensor_shapes(tiny_qwen3)
    names = dict.fromkeys(tensor_shapes(tiny_qwen3), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert tensor_shapes(folder) == tensor_shapes(tiny_qwen3)


def drop(weights: dict[str, TensorFacts]) -> None:
    del weights["model.norm.weight"]


def add(weights: dict[str, TensorFacts]) -> None:
    weights["model.norm.bias"] = facts((64,))


def widen(weights: dict[str, TensorFacts]) -> None:
    weights["model.norm.weight"] = facts((65,))


def untie(weights: dict[str, TensorFacts]) -> None:
    weights["lm_head.weight"] = facts((512, 64), 7)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, r"model.norm.weight is missing \(1 missing and 0 unknown of 20\)"),
        (add, "model.norm.bias is not in the model"),
        (widen, r"model.norm.weight has shape \(65,\), the model's has \(64,\)"),
        (untie, "lm_head.weight differs from embed_tokens.weight, but the model ties them"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    tiny_llama: Path, damage: Callable[[dict[str, TensorFacts]], None], message: str
) -> None:
    weights = facts_of(tiny_llama)
    damage(weights)
    with pytest.raises(WeightsMismatch, match=message):
        check_weights(weights, tensor_shapes(tiny_llama), tied=True)


def test_a_tied_output_layer_may_be_published_or_not(tiny_llama: Path, tiny_qwen3: Path) -> None:
    weights, shapes = facts_of(tiny_llama), tensor_shapes(tiny_llama)
    check_weights(weights, shapes, tied=True)
    check_weights({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, shapes, tied=True)
    untied = facts_of(tiny_qwen3)
    del untied["lm_head.weight"]
    with pytest.raises(WeightsMismatch, match="lm_head.weight is missing"):
        check_weights(untied, tensor_shapes(tiny_qwen3), tied=False)
