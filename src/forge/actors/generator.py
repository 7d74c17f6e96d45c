"""[2] Generator: answers prompts with sampled completions, from weights that are exchanged while it runs."""

import asyncio
import contextlib
import contextvars
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from forge.controller import ForgeActor, Runtime, endpoint
from forge.data_models import Completion, Prompt
from forge.errors import ConfigError, ForgeError
from forge.observability import record
from forge.weights import close_store, fetch, open_store, versions

if TYPE_CHECKING:
    from forge.actors._vllm.engine import Engine
    from forge.actors._vllm.engine_loop import EngineLoop
    from forge.actors._vllm.exchange import WeightExchange
    from forge.actors._vllm.worker import MeshWorker


class Generator(ForgeActor):
    """vLLM as an actor. Calls that overlap share one engine (continuous batching).

    engine_config: by the names of vLLM's EngineArgs. `model` is a folder or any form that
        `forge.data.assets.fetch` takes; it holds version 0 of the weights. With `tensor_parallel_size` and
        `pipeline_parallel_size`, `procs` is their product.
    sampling_config: by the names of vLLM's SamplingParams, for every call that does not say otherwise.
        Training needs the full distribution: with `top_p`, `top_k`, `min_p` or penalties, log-probabilities
        are those of the reduced one, which the trainer can't compute.
    seed: each replica samples from its own random numbers, the same in every run with this seed.
    """

    compute_bound = True
    driver_only = True

    _engine: "Engine"
    _loop: "EngineLoop"
    _exchange: "WeightExchange"

    def __init__(
        self, engine_config: Mapping[str, Any], sampling_config: Mapping[str, Any], seed: int = 0
    ) -> None:
        self._engine_config = dict(engine_config)
        self._sampling_config = dict(sampling_config)
        self._seed = seed

    @classmethod
    def bootstrap_env(cls) -> dict[str, str]:
        """The engine in this process itself, quiet, its threads left where the provisioner put them."""
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }

    @classmethod
    async def prepare(cls) -> None:
        """New weights come from the store."""
        await open_store()
        Runtime.current().on_close(close_store)

    async def setup(self) -> None:
        """Builds the engine in rank 0's process. The other ranks' workers follow its calls."""
        if not torch.cuda.is_available() and self._engine_config.get("enforce_eager", True):
            # Nothing to compile: saves the compilation of one small function, 2 s, at the first token.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
        tqdm.set_lock(threading.RLock())  # its own is a semaphore that nobody removes after a kill
        if self.rank == 0:
            self._engine = await self._start_engine()
            from forge.actors._vllm.engine_loop import EngineLoop
            from forge.actors._vllm.exchange import WeightExchange

            self._loop = EngineLoop(self._engine, self.run_blocking)
            self._exchange = WeightExchange(self._engine, self._loop, self._stage_everywhere, versions)
        else:
            await self.run_blocking(lambda: self._worker)

    @property
    def weights_version(self) -> int | None:
        """The version that the next token is sampled from."""
        return self._engine.version if hasattr(self, "_engine") else None

    async def catch_up(self) -> None:
        """Takes the newest weights that the trainer has published; until there are any, the folder's."""
        if self.rank == 0:  # for all ranks
            await self._exchange.catch_up()

    async def teardown(self) -> None:
        """Calls that still wait fail. What the engine holds goes with the process."""
        if hasattr(self, "_loop"):
            self._loop.fail("the generator was stopped")

    @endpoint
    async def generate(self, prompt: Prompt, **sampling: Any) -> list[Completion]:
        """`n` completions of a prompt, in order.

        prompt: text, tokenized as it stands (a chat template's text holds its begin token already), or token
        ids. sampling: keys of `sampling_config` for this call. At temperature 0 the log-probabilities are
        those of temperature 1. When the caller is cancelled, sampling ends.

        Raises PromptTooLong when it leaves no room for a token in `max_model_len`, ConfigError for sampling
        keys or values that vLLM does not take, ForgeError when the weights produce no finite numbers, and
        ActorFailure when the engine has failed.
        """
        from forge.actors._vllm.arguments import sampling_params
        from forge.actors._vllm.completions import to_completions

        loop, tokenizer = self._on_driver("generate"), self._engine.tokenizer
        params = sampling_params({**self._sampling_config, **sampling})
        ids = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else list(prompt)
        completions = to_completions(await loop.generate(ids, params), params, tokenizer)
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        record(
            "generator",
            num_tokens=num_tokens,
            completion_length=num_tokens / len(completions),
            stopped=sum(c.stop_reason == "stop" for c in completions) / len(completions),
        )
        return completions

    @endpoint(retry=True)
    async def update_weights(self, version: int) -> int:
        """Goes on with a published version of the weights; returns the version it then holds.

        Where it holds this version already, or a newer one that it caught up with, nothing is done: it never
        goes back. Tokens of running calls keep the version that sampled them; the calls go on with the new
        one. While the weights are fetched, sampling continues. Raises WeightsMissing or WeightsMismatch and
        goes on with the old version when the new one can't be had or isn't this model's.
        """
        self._on_driver("update_weights")
        return await self._exchange.update(version)

    @endpoint(retry=True)
    async def score(self, token_ids: list[int]) -> Tensor:
        """Log-probability of each token but the first, given those before it, under the current weights at
        temperature 1: [T - 1] float32, in nats."""
        from forge.actors._vllm.arguments import scoring_params
        from forge.actors._vllm.completions import text_logprobs

        return text_logprobs(await self._on_driver("score").generate(list(token_ids), scoring_params()))

    @endpoint(retry=True)
    async def version(self) -> int:
        """The version of the weights that the next token is sampled from."""
        self._on_driver("version")
        return self._engine.version

    @endpoint
    async def stage_weights(self, version: int, timeout_s: float) -> None:
        """Fetches a version for this rank's worker; part of `update_weights`."""
        from forge.actors._vllm.worker import stage

        stage(version, await fetch(version, timeout_s))

    @endpoint
    async def worker_rpc(self, request: bytes) -> bytes | None:
        """One call of rank 0's executor to this rank's worker; rank 0 calls its own by itself."""
        if self.rank == 0:
            return None
        return await self.run_blocking(lambda: self._worker.call_pickled(request))

    @functools.cached_property
    def _worker(self) -> "MeshWorker":
        """This rank's vLLM worker; to be used on the compute thread only."""
        from forge.actors._vllm.worker import MeshWorker

        return MeshWorker(self.rank)

    async def _stage_everywhere(self, version: int, timeout_s: float) -> None:
        if self.world_size > 1:
            await self.peers.stage_weights.call(version, timeout_s)
        else:
            await self.stage_weights(version, timeout_s)

    async def _start_engine(self) -> "Engine":
        from forge.data import assets

        if "model" not in self._engine_config:
            raise ConfigError("engine_config.model is required: a model's folder, or hf://Org/Name")
        folder = await asyncio.to_thread(assets.fetch, self._engine_config["model"])
        call_peers = self._peer_caller() if self.world_size > 1 else None
        return await self.run_blocking(
            _make_engine,
            self._engine_config,
            self._sampling_config,
            folder=folder,
            seed=engine_seed(self._seed, self.replica, self.generation),
            num_procs=self.world_size,
            call_peers=call_peers,
        )

    def _peer_caller(self) -> Callable[[bytes], Future[list[bytes | None]]]:
        """A function that the engine's thread calls to reach all ranks."""
        event_loop, context = asyncio.get_running_loop(), contextvars.copy_context()

        async def call(request: bytes) -> list[bytes | None]:
            try:
                return [result for _, result in (await self.peers.worker_rpc.call(request)).items()]
            except Exception as error:  # the engine's thread may wait for ever in a collective with that rank
                if hasattr(self, "_loop"):
                    self._loop.fail(f"a rank of the generator failed: {type(error).__name__}: {error}")
                raise

        def call_from_thread(request: bytes) -> Future[list[bytes | None]]:
            # Monarch finds in the context which actor is calling.
            return context.copy().run(asyncio.run_coroutine_threadsafe, call(request), event_loop)

        return call_from_thread

    def _on_driver(self, method: str) -> "EngineLoop":
        if self.rank != 0:
            raise ForgeError(f"rank {self.rank} of a generator has no engine: use .{method}.route, not .call")
        return self._loop


Policy = Generator


def engine_seed(seed: int, replica: int, generation: int = 0) -> int:
    """vLLM's seed of one replica, in [0, 2^32): no two replicas and seeds below 2^16 share one.

    One that was replaced does not begin its random numbers again.
    """
    return (seed * 65_536 + replica + 1024 * generation % 65_536) % 2**32


def _make_engine(config: dict[str, Any], sampling: dict[str, Any], **kwargs: Any) -> "Engine":
    with _without_garbage_collection():
        from forge.actors._vllm.arguments import sampling_params
        from forge.actors._vllm.engine import Engine

        sampling_params(sampling)  # a wrong key is told before the weights are loaded
        gc.freeze()  # vLLM collects several times while it builds the engine
        return Engine(config, **kwargs)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Nearly half of the engine's start was the collector going through what imports leave, again and again.

    What was made meanwhile is there to stay, and later collections pass it over.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
