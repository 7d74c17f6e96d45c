"""[2] Generator: answers prompts with sampled completions, from weights that are exchanged while it runs."""

import asyncio
import contextlib
import contextvars
import functools
import gc
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from forge.actors._vllm.in_flight import InFlight
from forge.actors.memory import keep_freed_memory
from forge.controller import ForgeActor, Runtime, endpoint
from forge.controller.call import ledger
from forge.data_models import Completion, Prompt
from forge.errors import ConfigError, ForgeError
from forge.observability import record
from forge.weights import Shards, close_store, fetch_shards, newest_lost, open_store, versions

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
    in_flight: what becomes of running calls when new weights come: `recompute` (they go on, their KV cache is
        computed anew), `keep` (they go on with the KV cache of the old weights) or `finish` (they end under
        the old weights, and new calls wait until then).
    seed: each replica samples from its own random numbers, the same in every run with this seed.
    deterministic: tokens and log-probabilities of a call are, bit for bit, a function of weights, prompt and
        `sampling` alone, whatever else runs or has run, and on whichever replica of equal hardware. Each call
        that samples then needs a `seed` of its own (see `call_seed`). On a CPU calls run one after the other,
        each with its `n` completions in a batch of its own; on a GPU together, by vLLM's batch-invariant
        kernels. A call that new weights come into is the exception: which token was the first of theirs is a
        matter of time.
    """

    compute_bound = True
    driver_only = True

    _engine: "Engine"
    _loop: "EngineLoop"
    _exchange: "WeightExchange"

    def __init__(
        self,
        engine_config: Mapping[str, Any],
        sampling_config: Mapping[str, Any],
        seed: int = 0,
        in_flight: str = "recompute",
        deterministic: bool = False,
    ) -> None:
        self._engine_config = dict(engine_config)
        self._sampling_config = dict(sampling_config)
        self._seed = seed
        self._in_flight = InFlight.of(in_flight)
        self._deterministic = deterministic

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
        if self._deterministic and torch.cuda.is_available():
            _use_batch_invariant_kernels()
        keep_freed_memory()  # of the weights before, say, to pack the next ones into
        tqdm.set_lock(threading.RLock())  # its own is a semaphore that nobody removes after a kill
        if self.rank == 0:
            self._engine = await self._start_engine()
            from forge.actors._vllm.engine_loop import EngineLoop
            from forge.actors._vllm.exchange import WeightExchange

            self._loop = EngineLoop(self._engine, self.run_blocking, one_at_a_time=self._engine.isolates)
            self._exchange = WeightExchange(
                self._engine,
                self._loop,
                self._stage_everywhere,
                versions,
                newest_lost,
                name=ledger.actor,
                when_idle=self._in_flight is InFlight.FINISH,
            )
        else:
            await self.run_blocking(lambda: self._worker)

    @property
    def weights_version(self) -> int | None:
        """The version that the next token is sampled from."""
        return self._exchange.held if hasattr(self, "_exchange") else None

    async def catch_up(self) -> None:
        """Takes the newest weights that the trainer has published; until there are any, the folder's.

        Raises WeightsMissing where newer ones than it can have are lost.
        """
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
        keys or values that vLLM does not take or for a `seed` that a deterministic generator misses,
        ForgeError when the weights produce no finite numbers, and ActorFailure when the engine has failed.
        """
        from forge.actors._vllm.arguments import sampling_params
        from forge.actors._vllm.completions import to_completions

        loop, tokenizer = self._on_driver("generate"), self._engine.tokenizer
        params = sampling_params({**self._sampling_config, **sampling}, needs_seed=self._deterministic)
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
        goes back. Tokens of running calls keep the version that sampled them. Sampling continues while the
        weights are fetched and proven. On a CPU without compilation it also does while they are packed and
        checked; elsewhere they are loaded and checked between two steps.

        Raises WeightsMissing, and goes on with the old version, when the new one can't be had. Raises
        WeightsMismatch, naming the tensor, when what arrives isn't what was published or isn't this model's:
        then it serves no more (ReplicaUnfit, for which a service goes to other replicas and replaces this
        one) until it has a version that is proven.
        """
        self._on_driver("update_weights")
        return await self._exchange.update(version)

    @endpoint(retry=True)
    async def sleep(self) -> None:
        """Samples nothing until `wake`, so that the trainer has the GPUs or cores that both use.

        Calls wait; those that run go on afterwards, or with in_flight "finish" end before. With vLLM's
        `enable_sleep_mode` the memory of the GPU is free meanwhile: weights go to the host's memory, and the
        KV cache is computed anew. New weights may come at any time (`update_weights`). A second time, nothing
        is done. A replica that takes the place of a lost one is awake.
        """
        await self._on_driver("sleep").sleep(when_idle=self._in_flight is InFlight.FINISH)

    @endpoint(retry=True)
    async def wake(self) -> None:
        """Goes on after `sleep`, with the calls that waited; while it is awake, nothing is done."""
        await self._on_driver("wake").wake()

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
    async def stage_weights(self, version: int, timeout_s: float) -> Shards:
        """Fetches what this rank needs of a version; part of `update_weights`. Returns all but the values."""
        from forge.actors._vllm.worker import rank_weights

        shards = await fetch_shards(version, rank_weights().plan.boxes, timeout_s)
        rank_weights().stage(shards)
        return replace(shards, tensors={})

    @endpoint
    async def prepare_weights(self, version: int) -> None:
        """Packs them beside those in use; part of `update_weights`, after all ranks' are proven."""
        from forge.actors._vllm.worker import rank_weights

        await asyncio.wrap_future(rank_weights().prepare(version))

    @endpoint
    async def drop_weights(self) -> None:
        """Lets go of what was staged for an update that failed."""
        from forge.actors._vllm.worker import rank_weights

        rank_weights().drop()

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
        """Raises WeightsMismatch before anything of the model has changed."""
        try:
            staged = await self._on_all_ranks("stage_weights", version, timeout_s)
            self._engine.check(staged[0].manifest, [shards.claims for shards in staged])
            await self._on_all_ranks("prepare_weights", version)
        except BaseException:
            await self._on_all_ranks("drop_weights")
            raise

    async def _on_all_ranks(self, method: str, *args: Any) -> list[Any]:
        if self.world_size == 1:
            return [await getattr(self, method)(*args)]
        return [result for _, result in (await getattr(self.peers, method).call(*args)).items()]

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
            in_flight=self._in_flight,
            deterministic=self._deterministic,
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


def call_seed(seed: int, *numbers: int) -> int:
    """A call's seed from those of the run and of what is asked, [0, 2^62): near no other call's.

    vLLM seeds the i-th of a call's completions with the call's seed + i, so that calls with seeds next to
    each other would sample alike.
    """
    digest = hashlib.blake2b(repr((seed, *numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def _use_batch_invariant_kernels() -> None:
    """Before vLLM is imported: its kernels then add up in an order that no other request changes."""
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise ConfigError(
            "a deterministic generator needs a GPU of compute capability 8.0 or more, this is a "
            f"{torch.cuda.get_device_name()} with {major}.{minor}: leave generator.deterministic out"
        )
    os.environ["VLLM_BATCH_INVARIANT"] = "1"


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
