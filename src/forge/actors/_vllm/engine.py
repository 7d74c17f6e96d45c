"""Engine: vLLM's engine as the Generator uses it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from vllm import SamplingParams
from vllm.exceptions import VLLMError
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from forge.actors._vllm.arguments import engine_args, engine_config
from forge.actors._vllm.checkpoint import check_weights, tensor_shapes
from forge.actors._vllm.executor import CallPeers, MeshExecutor
from forge.actors._vllm.in_flight import InFlight
from forge.actors._vllm.load_plan import whole_where_untiled
from forge.actors._vllm.worker import WeightNeeds
from forge.errors import ForgeError, PromptTooLong, WeightsMismatch
from forge.weights import Claim, Manifest

logger = logging.getLogger(__name__)


class Engine:
    """Samples from the weights of one version at a time.

    All methods, the constructor too, belong on one thread: an OpenMP pool belongs to the thread that made it.
    Between two calls of `step` requests may be added and weights exchanged.

    config: by the names of vLLM's EngineArgs; in_flight: what becomes of requests when weights are exchanged;
    deterministic: see the Generator; call_peers: reaches the workers of the other processes.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        folder: Path,
        seed: int,
        in_flight: InFlight = InFlight.RECOMPUTE,
        deterministic: bool = False,
        num_procs: int = 1,
        call_peers: CallPeers | None = None,
    ) -> None:
        MeshExecutor.call_peers = call_peers
        executor = MeshExecutor if num_procs > 1 else None
        args = engine_args(config, model=str(folder), seed=seed, num_procs=num_procs, executor=executor)
        vllm_config = engine_config(args, deterministic=deterministic)
        self._engine = LLMEngine.from_vllm_config(vllm_config, disable_log_stats=True)
        self._do_one_step_at_a_time()
        self._in_flight = in_flight
        # Kernels for a CPU add up in an order that depends on how many rows they are given.
        self.isolates: bool = deterministic and current_platform.is_cpu()
        self._shapes = tensor_shapes(folder)
        self._tied = self._plan_loading()
        self.max_model_len: int = self._engine.model_config.max_model_len
        self.tokenizer = cast(Any, self._engine.get_tokenizer())
        self._vllm_ids: dict[str, str] = {}  # of unfinished requests
        # Level 1 of vLLM's sleep mode: weights to host memory, KV cache dropped. Level 2 would drop the
        # weights too, and they are in use still should no new ones come before it wakes.
        self._frees_memory: bool = vllm_config.model_config.enable_sleep_mode
        self._is_asleep = False
        self.version = 0
        self._num_loads = 0
        self._engine.set_weight_version("0")

    @property
    def is_busy(self) -> bool:
        """Whether requests wait for a step."""
        return self._engine.has_unfinished_requests()

    def add(self, request_id: str, prompt_ids: list[int], sampling: SamplingParams) -> None:
        """Queues a request for the next step. Raises PromptTooLong, or ForgeError with vLLM's reason.

        Where the engine `isolates`, no other request may be unfinished.
        """
        if len(prompt_ids) + 1 > self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens, the engine takes {self.max_model_len - 1} and one "
                "to sample: shorten it or raise training.seq_len (engine_config.max_model_len)"
            )
        if (
            self.isolates
        ):  # the rest of a prompt whose beginning is cached is another computation than all of it
            was_reset = self._engine.reset_prefix_cache()
            assert was_reset, "a request is not alone"
        try:
            [prompt] = self._engine.renderer.render_cmpl([{"prompt_token_ids": prompt_ids}])
            if self._in_flight is InFlight.KEEP:
                cast(Any, prompt)["cache_salt"] = self._salt
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

    def check(self, manifest: Manifest, claims: Sequence[Mapping[str, Claim]]) -> None:
        """Raises WeightsMismatch, naming the tensor, unless a version is of this model and has arrived.

        claims: what each rank has fetched. May be called from any thread.
        """
        try:
            check_weights(manifest.tensors, self._shapes, tied=self._tied)
        except WeightsMismatch as error:
            told = f"version {manifest.version} of the weights doesn't fit: {error}"
            raise WeightsMismatch(told) from None
        try:
            manifest.prove(claims)
        except WeightsMismatch as error:
            told = f"version {manifest.version} of the weights is damaged: {error}"
            raise WeightsMismatch(told) from None

    def load(self, version: int) -> None:
        """Goes on with the weights that are staged on all ranks; requests go on as `in_flight` says.

        Raises WeightsMismatch where a rank doesn't hold what was staged. Any error leaves the engine unusable
        until it has loaded other weights.
        """
        self._num_loads += 1
        if self._is_asleep:  # to be loaded into, weights need their memory; the KV cache doesn't
            self._engine.wake_up(["weights"])
        wrong = self._engine.collective_rpc("load_staged_weights", args=(version,))
        for rank, mismatch in enumerate(wrong):
            if mismatch is not None:
                raise WeightsMismatch(f"version {version} of the weights, rank {rank}: {mismatch}")
        if self._in_flight is InFlight.KEEP:
            self._renew_salts()
        else:
            was_reset = self._engine.reset_prefix_cache(reset_running_requests=True)
            assert was_reset, "vLLM kept KV cache of the old weights"
        self._engine.set_weight_version(str(version))
        self.version = version
        if self._is_asleep:
            self._engine.sleep(level=1, mode="keep")

    def sleep(self) -> None:
        """Gives its GPU memory to others, where `enable_sleep_mode` lets it; no `step` until `wake`.

        Unfinished requests then have their KV cache computed anew, whatever `in_flight` says.
        """
        if self._frees_memory:
            was_reset = self._engine.reset_prefix_cache(reset_running_requests=True)
            assert was_reset, "vLLM kept KV cache that is about to be dropped"
            self._engine.sleep(level=1, mode="keep")
            self._is_asleep = True

    def wake(self) -> None:
        """Takes the memory back; RuntimeError of CUDA where it isn't free."""
        if self._is_asleep:
            self._engine.wake_up()
            self._is_asleep = False

    def _do_one_step_at_a_time(self) -> None:
        """No batch, sampled already, waits in a queue for the step after weights are exchanged: vLLM has one
        for pipeline stages, of which an executor that waits for its workers has no use."""
        core = cast(Any, self._engine.engine_core).engine_core
        core.batch_queue = None
        core.step_fn = core.step

    def _plan_loading(self) -> bool:
        """Has every rank find out what it needs of a version; returns whether the model has a tied head."""
        needs: list[WeightNeeds] = self._engine.collective_rpc("plan_loading", args=(self._shapes,))
        whole = whole_where_untiled([of_rank.boxes for of_rank in needs], self._shapes)
        self._engine.collective_rpc("fetch_whole", args=(whole,))
        unproven = {name: why for of_rank in needs for name, why in of_rank.unproven.items()}
        if unproven:
            name, why = next(iter(unproven.items()))
            logger.warning(
                "%d parameters are not compared with the weights that arrive: %s, since %s",
                len(unproven),
                ", ".join(unproven),
                f"for {name} {why}",
            )
        return any(of_rank.has_tied_head for of_rank in needs)

    @property
    def _salt(self) -> str:
        """That of the KV cache of these weights: a version may be loaded again, with others."""
        return str(self._num_loads)

    def _renew_salts(self) -> None:
        """No request that begins from now on finds KV cache of older weights.

        vLLM looks for the blocks of a prompt by the hash of its tokens and of its salt, which is that of the
        weights that the request began under. Requests that wait for their first step get the new one.
        """
        scheduler = cast(Any, self._engine.engine_core).engine_core.scheduler
        for request in scheduler.waiting:
            if request.num_computed_tokens == 0 and request.num_preemptions == 0:
                request.cache_salt = self._salt
                request.block_hashes.clear()
                request.update_block_hashes()
