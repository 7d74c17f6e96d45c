"""vLLM's workers in this process: one that serves a mesh, and what forge adds to every worker."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import cloudpickle
from torch import Tensor
from vllm.config import CompilationMode
from vllm.distributed import get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from forge.actors._vllm.rank_weights import RankWeights, tied_heads
from forge.actors._vllm.shared_memory import unlink_names
from forge.errors import WeightsMismatch
from forge.weights import Box

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase as _Worker
else:
    _Worker = object

_weights: RankWeights | None = None


def rank_weights() -> RankWeights:
    """Those of this process's worker, once the engine is built."""
    assert _weights is not None, "the engine has not been built"
    return _weights


@dataclass(frozen=True, slots=True)
class WeightNeeds:
    """What one rank needs of every version; see `LoadPlan`."""

    boxes: dict[str, Box]
    unproven: dict[str, str]
    has_tied_head: bool  # output and input embeddings are one tensor


class WorkerExtension(_Worker):
    """Mixed into vLLM's worker, which finds it by name (`worker_extension_cls`)."""

    def finish_start(self) -> None:
        """On a CPU, what vLLM leaves undone where several ranks share a model; after all have loaded it."""
        if not current_platform.is_cpu():
            return
        unlink_names(self.rank, get_tp_group().mq_broadcaster)
        runner = cast(Any, self.model_runner)
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            # Made by a trial run, which is skipped where nothing is compiled.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=runner.device
            )

    def plan_loading(self, shapes: dict[str, tuple[int, ...]]) -> WeightNeeds:
        """Finds out which boxes of the checkpoint's tensors this rank needs; before the first step."""
        global _weights
        model = self.get_model()
        is_compiled = self.vllm_config.compilation_config.mode != CompilationMode.NONE
        _weights = RankWeights(model, shapes, self._reload_in_place, is_compiled=is_compiled)
        plan = _weights.plan
        return WeightNeeds(plan.boxes, plan.unproven, has_tied_head=bool(tied_heads(model)))

    def fetch_whole(self, names: set[str]) -> None:
        """See `RankWeights`."""
        rank_weights().fetch_whole(names)

    def load_staged_weights(self, version: int) -> str | None:
        """Goes on with the weights that are staged in this process; returns what is wrong with them then.

        Not raised here, since the ranks' calls have to meet.
        """
        try:
            rank_weights().load(version)
        except WeightsMismatch as mismatch:
            return str(mismatch)
        return None

    def _reload_in_place(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.reload_weights(weights_iterator=weights)  # type: ignore[attr-defined]


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
