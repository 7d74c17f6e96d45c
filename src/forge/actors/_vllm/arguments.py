"""A user's `engine_config` and `sampling_config` as vLLM takes them, every key checked by name."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import psutil
import torch
from pydantic import ValidationError
from vllm import EngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMError
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingType

from forge.errors import ConfigError
from forge.hardware import cpu_has_bfloat16, warn_of_slow_bfloat16

# Keys that the Generator sets itself, and why nobody else may.
_OWN_ENGINE_KEYS = {
    "seed": "give Generator(seed=...), from which every replica gets its own",
    "logprobs_mode": "log-probabilities are always those of the distribution that was sampled from",
    "distributed_executor_backend": "the engine runs in the Generator's own processes",
    "worker_extension_cls": "the Generator loads weights through it",
    "data_parallel_size": "use num_replicas",
}
_OWN_SAMPLING_KEYS = {
    "logprobs": "the log-probability of every sampled token is always returned",
    "flat_logprobs": "it only shapes vLLM's own answer",
    "prompt_logprobs": "a Completion has no place for them",
    "output_kind": "a Generator answers with finished completions",
    "detokenize": "text is always returned",
}
# Seconds sooner to start and up to a third faster than vLLM's own defaults for a CPU. Prompts are computed
# whole: after a part of one, vLLM 0.32 rewinds the call's own random numbers, which those of a CPU can't do.
_CPU_DEFAULTS = {
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": 64,
    "enable_chunked_prefill": False,
}
_WORKER_EXTENSION = "forge.actors._vllm.worker.WorkerExtension"


def engine_args(
    config: Mapping[str, Any], *, model: str, seed: int, num_procs: int, executor: type | None
) -> EngineArgs:
    """vLLM's arguments for `config`, with `model` as a local folder; ConfigError for what can't be.

    executor: runs the model on the other processes; None with a single process.
    """
    _check_keys("engine_config", config, [field.name for field in fields(EngineArgs)], _OWN_ENGINE_KEYS)
    degrees = [config.get(key, 1) for key in ("tensor_parallel_size", "pipeline_parallel_size")]
    if degrees[0] * degrees[1] != num_procs:
        raise ConfigError(
            f"the generator has {num_procs} processes, but engine_config wants tensor_parallel_size "
            f"{degrees[0]} x pipeline_parallel_size {degrees[1]} = {degrees[0] * degrees[1]}: "
            "set services.generator.procs to the product"
        )
    own = {
        "model": model,
        "seed": seed,
        "logprobs_mode": "processed_logprobs",
        "distributed_executor_backend": executor or "uni",
        "worker_extension_cls": _WORKER_EXTENSION,
    }
    # Without the overlap of steps, every token is sampled by the weights that its step began with.
    # The format: the config.json that the trainer reads, also where Mistral's params.json is beside it.
    defaults: dict[str, Any] = {"use_tqdm_on_load": False, "async_scheduling": False, "config_format": "hf"}
    if current_platform.is_cpu():
        if config.get("enable_chunked_prefill"):
            raise ConfigError(
                "engine_config.enable_chunked_prefill must be false on a CPU: vLLM fails there at a part "
                "of a prompt whose call has a seed; leave it out"
            )
        defaults |= _CPU_DEFAULTS
        if not cpu_has_bfloat16():
            defaults["dtype"] = "float32"
    return EngineArgs(**{**defaults, **config, **own})


def engine_config(args: EngineArgs, *, deterministic: bool = False) -> VllmConfig:
    """vLLM's complete configuration; ConfigError with vLLM's reason where it refuses the arguments.

    deterministic: on a CPU nothing is left to chance that could change what is computed.
    """
    try:
        config = args.create_engine_config()
    except (VLLMError, ValidationError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"vLLM refuses engine_config: {_reason(error)}") from error
    if current_platform.is_cpu():
        if config.model_config.dtype == torch.bfloat16:
            warn_of_slow_bfloat16("the generator")
        if deterministic and not config.model_config.enforce_eager:
            raise ConfigError(
                "a deterministic generator compiles nothing on a CPU: drop engine_config.enforce_eager: false"
            )
        if config.cache_config.kv_cache_memory_bytes is None:
            size = full_kv_cache_nbytes if deterministic else kv_cache_nbytes
            config.cache_config.kv_cache_memory_bytes = size(config, psutil.virtual_memory().available)
    return config


def kv_cache_nbytes(config: VllmConfig, available: int) -> int:
    """Bytes of KV cache for `max_num_seqs` full sequences, but no more than a quarter of what is available.

    A single sequence always fits. With the size given, vLLM skips a trial run that would measure it.
    """
    sequence_nbytes = _sequence_nbytes(config)
    wanted = sequence_nbytes * config.scheduler_config.max_num_seqs
    return max(sequence_nbytes, min(wanted, available // 4 // config.parallel_config.world_size))


def full_kv_cache_nbytes(config: VllmConfig, available: int) -> int:
    """Bytes of KV cache for `max_num_seqs` full sequences; ConfigError where half the memory can't hold it.

    With less, some might be put off and computed anew, in other batches, depending on what was free at the
    start.
    """
    wanted = _sequence_nbytes(config) * config.scheduler_config.max_num_seqs
    share = available // 2 // config.parallel_config.world_size
    if wanted > share:
        raise ConfigError(
            "a deterministic generator has a KV cache of a fixed size, and that of max_num_seqs "
            f"{config.scheduler_config.max_num_seqs} x max_model_len {config.model_config.max_model_len} "
            f"takes {wanted / 2**30:.1f} GiB, where {share / 2**30:.1f} GiB are free for it: set "
            "engine_config.max_num_seqs to the completions of a prompt, or kv_cache_memory_bytes"
        )
    return wanted


def _sequence_nbytes(config: VllmConfig) -> int:
    """Bytes of KV cache for one sequence of `max_model_len` tokens."""
    model, parallel = config.model_config, config.parallel_config
    token_nbytes = (
        2  # keys and values
        * model.get_num_layers(parallel)
        * model.get_num_kv_heads(parallel)
        * model.get_head_size()
        * model.dtype.itemsize
    )
    block_size = config.cache_config.block_size
    num_blocks = -(-model.max_model_len // block_size) + 1
    return token_nbytes * block_size * num_blocks


def sampling_params(config: Mapping[str, Any], *, needs_seed: bool = False) -> SamplingParams:
    """One request's parameters; ConfigError for an unknown key or an impossible value.

    Without `max_tokens`, a completion may fill what the prompt leaves of `max_model_len`. needs_seed: whether
    what is sampled must be drawn from random numbers of the request's own.
    """
    known = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]
    _check_keys("sampling_config", config, known, _OWN_SAMPLING_KEYS)
    own = {
        "logprobs": 0,  # that of the sampled token alone
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "detokenize": bool(config.get("stop")),  # vLLM needs the text only to find stop strings in it
    }
    try:
        params = SamplingParams(**{"max_tokens": None, **config, **own})
    except (VLLMError, ValidationError, ValueError, TypeError) as error:
        raise ConfigError(f"vLLM refuses sampling_config: {_reason(error)}") from error
    if needs_seed and params.seed is None and params.sampling_type is not SamplingType.GREEDY:
        raise ConfigError(
            "a deterministic generator needs a seed for each call that samples, since what it would draw "
            "from otherwise depends on the calls before: generate(prompt, seed=call_seed(run_seed, number))"
        )
    return params


def scoring_params() -> SamplingParams:
    """Those of a request that is only about the log-probabilities of its prompt."""
    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=0,
        temperature=0.0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize=False,
    )


def _check_keys(where: str, config: Mapping[str, Any], known: Iterable[str], own: Mapping[str, str]) -> None:
    names = list(known)
    for key in config:
        if key in own:
            raise ConfigError(f"{where}.{key} is set by the generator: {own[key]}")
        if key not in names:
            close = difflib.get_close_matches(key, names, 1)
            hint = f"did you mean {close[0]}?" if close else "the names are those of vLLM"
            raise ConfigError(f"unknown key {where}.{key}: {hint}")


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        [first, *rest] = error.errors()
        key = f"{first['loc'][0]} = {first['input']!r}: " if first["loc"] else ""
        return key + " or ".join([first["msg"], *(problem["msg"] for problem in rest)])
    return " ".join(str(error).split())
