"""The executor: one engine in rank 0's process, and a worker in every process of the mesh."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

import cloudpickle
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_distributed_init_method, get_open_port
from vllm.v1.executor.abstract import Executor

from forge.actors._vllm.shared_memory import sweep_names
from forge.actors._vllm.worker import MeshWorker

CallPeers = Callable[[bytes], Future[list[bytes | None]]]
"""A pickled call -> the pickled results of all ranks by rank, None for rank 0 itself."""


class MeshExecutor(Executor):
    """Runs each call on the workers of all ranks at once: rank 0's in this thread, the others' by message."""

    supports_pp = True
    call_peers: ClassVar[CallPeers | None] = None  # set before the engine is built: vLLM makes the executor

    def _init_executor(self) -> None:
        config = self.parallel_config
        sweep_names()
        self._worker = MeshWorker(0)
        # With pipeline stages, the first rank of the last one has the output.
        self._output_rank = config.world_size - config.tensor_parallel_size
        init_method = get_distributed_init_method("127.0.0.1", get_open_port())
        all_kwargs = [
            {
                "vllm_config": self.vllm_config,
                "local_rank": rank,
                "rank": rank,
                "distributed_init_method": init_method,
                "is_driver_worker": rank % config.tensor_parallel_size == 0,
            }
            for rank in range(config.world_size)
        ]
        self.collective_rpc("init_worker", args=(all_kwargs,))
        self.collective_rpc("init_device")
        self.collective_rpc("load_model")
        self.collective_rpc("finish_start")
        current_platform.update_block_size_for_backend(self.vllm_config)

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """The results of all ranks, in order; with non_block, in a future that is done already."""
        return _maybe_future(self._call(method, args, kwargs or {}), non_block)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """The output of the last pipeline stage."""
        results = self._call("execute_model", (scheduler_output,), {}, only=self._output_rank)
        return _maybe_future(results[self._output_rank], non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """What `execute_model` computed, sampled."""
        results = self._call("sample_tokens", (grammar_output,), {}, only=self._output_rank)
        return _maybe_future(results[self._output_rank], non_block)

    def check_health(self) -> None:
        """Nothing to ask: a call that fails raises."""

    def _call(
        self,
        method: str | Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        only: int | None = None,
    ) -> list[Any]:
        assert MeshExecutor.call_peers is not None
        others = MeshExecutor.call_peers(cloudpickle.dumps((method, args, kwargs, only)))
        own = self._worker.call(method, args, kwargs)
        return [own, *(cloudpickle.loads(result) for result in others.result() if result is not None)]


def _maybe_future(result: Any, wrap: bool) -> Any:
    if not wrap:
        return result
    future: Future[Any] = Future()
    future.set_result(result)
    return future
