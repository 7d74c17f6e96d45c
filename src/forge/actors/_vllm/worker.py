"""vLLM's workers in this process: one that serves a mesh, and what forge adds to every worker."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase as _Worker
else:
    _Worker = object

_staged: dict[int, dict[str, Tensor]] = {}


def stage(version: int, tensors: dict[str, Tensor]) -> None:
    """Keeps weights for this process's worker to load; one version at a time."""
    _staged.clear()
    _staged[version] = tensors


def staged(version: int) -> dict[str, Tensor]:
    """The weights that `stage` kept."""
    return _staged[version]


class WeightLoading(_Worker):
    """Mixed into vLLM's worker, which finds it by name (`worker_extension_cls`)."""

    def load_staged_weights(self, version: int) -> None:
        """Replaces all weights, in place, by those staged in this process."""
        tensors = _staged.pop(version)
        self.reload_weights(weights_iterator=iter(tensors.items()))  # type: ignore[attr-defined]
        for head in tied_heads(self.get_model()):
            # On a CPU a layer computes with a packed copy of its weight, and vLLM renews those only of
            # layers for which a tensor arrived.
            head.quant_method.process_weights_after_loading(head)

    def has_tied_head(self) -> bool:
        """Whether output and input embeddings are one tensor."""
        return bool(tied_heads(self.get_model()))


def tied_heads(model: nn.Module) -> list[ParallelLMHead]:
    """The output layers that share their weight with an embedding."""
    embeddings = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    return [head for head in heads if any(head.weight is embedding.weight for embedding in embeddings)]


class MeshWorker:
    """One rank's vLLM worker, made and driven by the executor of rank 0."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._worker = WorkerWrapperBase(rpc_rank=rank, global_rank=rank)

    def call(self, method: str | Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs a method of the worker; what a step computes comes back when it is computed."""
        if method == "init_worker":
            args[0][self._rank]["local_rank"] = int(os.environ["LOCAL_RANK"])
        result = run_method(self._worker, method, args, kwargs)
        return result.get_output() if hasattr(result, "get_output") else result
