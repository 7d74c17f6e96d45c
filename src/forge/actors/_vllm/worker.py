"""vLLM's workers in this process: one that serves a mesh, and what forge adds to every worker."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import cloudpickle
from torch import Tensor, nn
from vllm.distributed import get_pp_group, get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase as _Worker
else:
    _Worker = object

_staged: dict[int, dict[str, Tensor]] = {}


def stage(version: int, tensors: dict[str, Tensor]) -> None:
    """Keeps weights for this process's worker to load, in place of older ones."""
    for older in [v for v in list(_staged) if v < version]:
        del _staged[older]
    _staged[version] = tensors


def staged(version: int) -> dict[str, Tensor]:
    """The weights that `stage` kept."""
    return _staged[version]


class WorkerExtension(_Worker):
    """Mixed into vLLM's worker, which finds it by name (`worker_extension_cls`)."""

    def finish_start(self) -> None:
        """On a CPU, what vLLM leaves undone where several ranks share a model; after all have loaded it."""
        if not current_platform.is_cpu():
            return
        _unlink_shared_memory(self.rank)
        runner = cast(Any, self.model_runner)
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            # Made by a trial run, which is skipped where nothing is compiled.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=runner.device
            )

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


def _unlink_shared_memory(rank: int) -> None:
    """All ranks have mapped each other's memory; without a name it goes when they go, even if killed."""
    queue = cast(Any, get_tp_group().mq_broadcaster)
    if queue is not None and queue.buffer.is_creator:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False  # or it would unlink it once more
    for path in Path("/dev/shm").iterdir():
        if path.name.startswith(f"{os.environ['VLLM_DIST_IDENT']}-") and path.name.endswith(f"cpushm_{rank}"):
            path.unlink()


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

    def call_pickled(self, request: bytes) -> bytes:
        """A call of the executor and its result, both pickled: to unpickle them imports much of vLLM, which
        two threads of a process can't do at once."""
        method, args, kwargs, only = cloudpickle.loads(request)
        result = self.call(method, args, kwargs)
        return cloudpickle.dumps(result if only in (None, self._rank) else None)

    def call(self, method: str | Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs a method of the worker; what a step computes comes back when it is computed."""
        if method == "init_worker":
            args[0][self._rank]["local_rank"] = int(os.environ["LOCAL_RANK"])
        result = run_method(self._worker, method, args, kwargs)
        return result.get_output() if hasattr(result, "get_output") else result
