"""Engine: vLLM's engine as the Generator uses it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from vllm import SamplingParams
from vllm.exceptions import VLLMError
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from forge.actors._vllm.arguments import engine_args, engine_config
from forge.actors._vllm.checkpoint import check_weights, tensor_shapes
from forge.actors._vllm.executor import CallPeers, MeshExecutor
from forge.actors._vllm.worker import staged
from forge.errors import ForgeError, PromptTooLong, WeightsMismatch


class Engine:
    """Samples from the weights of one version at a time.

    All methods, the constructor too, belong on one thread: an OpenMP pool belongs to the thread that made it.
    Between two calls of `step` requests may be added and weights exchanged.

    config: by the names of vLLM's EngineArgs; call_peers: reaches the workers of the other processes.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        folder: Path,
        seed: int,
        num_procs: int = 1,
        call_peers: CallPeers | None = None,
    ) -> None:
        MeshExecutor.call_peers = call_peers
        executor = MeshExecutor if num_procs > 1 else None
        args = engine_args(config, model=str(folder), seed=seed, num_procs=num_procs, executor=executor)
        self._engine = LLMEngine.from_vllm_config(engine_config(args), disable_log_stats=True)
        self._shapes = tensor_shapes(folder)
        self._tied = any(self._engine.collective_rpc("has_tied_head"))
        self.max_model_len: int = self._engine.model_config.max_model_len
        self.tokenizer = cast(Any, self._engine.get_tokenizer())
        self._vllm_ids: dict[str, str] = {}  # of unfinished requests
        self.version = 0
        self._engine.set_weight_version("0")

    @property
    def is_busy(self) -> bool:
        """Whether requests wait for a step."""
        return self._engine.has_unfinished_requests()

    def add(self, request_id: str, prompt_ids: list[int], sampling: SamplingParams) -> None:
        """Queues a request for the next step. Raises PromptTooLong, or ForgeError with vLLM's reason."""
        if len(prompt_ids) + 1 > self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens, the engine takes {self.max_model_len - 1} and one "
                "to sample: shorten it or raise training.seq_len (engine_config.max_model_len)"
            )
        try:
            [prompt] = self._engine.renderer.render_cmpl([{"prompt_token_ids": prompt_ids}])
            self._vllm_ids[request_id] = self._engine.add_request(request_id, prompt, sampling)
        except VLLMError as error:
            raise ForgeError(f"vLLM refuses the request: {error}") from error

    def step(self) -> list[RequestOutput]:
        """Samples one token for each running request; returns the requests that are finished by it."""
        outputs = self._engine.step() if self.is_busy else []
        finished = [o for o in outputs if isinstance(o, RequestOutput) and o.finished]
        for output in finished:
            del self._vllm_ids[output.request_id]
        return finished

    def abort(self, request_ids: list[str]) -> None:
        """Ends unfinished requests without an output, with all their completions; frees their KV cache."""
        # By the ids that were given, vLLM 0.32 would end the completions and keep what binds them for ever.
        self._engine.abort_request([self._vllm_ids.pop(id) for id in request_ids], internal=True)

    def load(self, version: int) -> None:
        """Goes on with the staged weights; running requests keep their tokens and compute the KV cache anew.

        Raises WeightsMismatch before anything is changed when the tensors are not those of the model; any
        other error leaves the engine unusable.
        """
        try:
            check_weights(staged(version), self._shapes, tied=self._tied)
        except WeightsMismatch as error:
            raise WeightsMismatch(f"version {version} of the weights doesn't fit: {error}") from None
        self._engine.collective_rpc("load_staged_weights", args=(version,))
        was_reset = self._engine.reset_prefix_cache(reset_running_requests=True)
        assert was_reset, "vLLM kept KV cache of the old weights"
        self._engine.set_weight_version(str(version))
        self.version = version
