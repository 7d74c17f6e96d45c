"""The only door to vLLM: one engine in this process, and how new weights get into it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind
from forge.data_models import Completion


class WeightLoading:
    def forge_load(self, tensors: Mapping[str, Tensor]) -> None:
        self.reload_weights(weights_iterator=iter(tensors.items()))
        model = self.get_model()
        head = getattr(model, "lm_head", None)
        emb = getattr(getattr(model, "model", model), "embed_tokens", None)
        if (
            head is not None
            and emb is not None
            and head is not emb
            and getattr(head, "weight", None) is getattr(emb, "weight", None)
        ):
            head.quant_method.process_weights_after_loading(head)


def build(config, seed):
    kw = dict(
        enforce_eager=True,
        block_size=32,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        seed=seed,
        worker_extension_cls="forge.actors._vllm.WeightLoading",
        kv_cache_memory_bytes=1 << 29,
    )
    config = {k: v for k, v in config.items() if k != "gpu_memory_utilization"}
    eng = LLMEngine.from_engine_args(EngineArgs(**{**kw, **config}))
    eng.set_weight_version("0")
    return eng
