"""The processes that weight_sync.py measures: who publishes, who generates, and stock TorchStore."""

import asyncio
import contextlib
import functools
import inspect
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forge.actors.generator import Generator
from forge.controller import ForgeActor, endpoint

Times = dict[str, float]


def read_weights(folder: str) -> dict[str, Tensor]:
    """bfloat16, in memory of this process's own."""
    found = {name: t for path in Path(folder).glob("*.safetensors") for name, t in load_file(path).items()}
    return {name: found.pop(name).to(torch.bfloat16).clone() for name in sorted(found)}


def change(weights: dict[str, Tensor]) -> None:
    """One element of each, so that no two versions are alike."""
    for tensor in weights.values():
        tensor.view(-1)[0] += 1


class Publisher(ForgeActor):
    """Holds the weights as a trainer of one rank does; copies and writes them the other ways, too."""

    compute_bound = True

    def __init__(self, folder: str, keep_float32: bool) -> None:
        self._folder, self._keep_float32 = folder, keep_float32

    async def setup(self) -> None:
        self._weights = read_weights(self._folder)
        self._masters = {n: t.float() for n, t in self._weights.items()} if self._keep_float32 else None
        self._flat = np.concatenate([t.view(-1).view(torch.uint8).numpy() for t in self._weights.values()])
        self._copy = self._flat.copy()

    @endpoint
    async def nbytes(self) -> int:
        return self._flat.nbytes

    @endpoint
    async def push(self, version: int, from_float32: bool = False) -> Times:
        """Seconds of a push, and of the packing, which is what the trainer waits for."""
        from forge.weights import begin_push

        weights = self._masters if from_float32 else self._weights
        assert weights is not None
        change(weights)
        began = time.perf_counter()
        push = await begin_push(version, rank=0, world_size=1)
        begun = time.perf_counter()
        await self.run_blocking(push.pack, weights, torch.bfloat16)
        packed = time.perf_counter()
        await push.publish()
        ended = time.perf_counter()
        return {"began": began, "push_s": ended - began, "pack_s": packed - begun}

    @endpoint
    async def retire(self, version: int) -> None:
        from forge.weights import retire

        await retire(version)

    @endpoint
    async def memcpy(self) -> float:
        """Seconds to copy as many bytes, all pages touched before."""

        def copy() -> float:
            started = time.perf_counter()
            np.copyto(self._copy, self._flat)  # by one thread
            return time.perf_counter() - started

        return await self.run_blocking(copy)

    @endpoint
    async def write_file(self, path: str) -> float:
        started = time.perf_counter()
        await self.run_blocking(save_file, self._weights, path)
        return time.perf_counter() - started


class MeasuredGenerator(Generator):
    """Tells when it did what: the parts of each update, and every step with the tokens it sampled."""

    async def setup(self) -> None:
        await super().setup()
        self._steps: list[tuple[float, float, int]] = []
        self._times: Times = {}
        await self.run_blocking(self._watch_engine)

    def _watch_engine(self) -> None:
        engine: Any = self._engine
        core = engine._engine.engine_core
        get_output, step, load = core.get_output, engine.step, engine.load
        num_tokens = 0

        def counting() -> Any:
            nonlocal num_tokens
            outputs = get_output()
            num_tokens += sum(len(output.new_token_ids) for output in outputs.outputs)
            return outputs

        def timed_step() -> Any:
            nonlocal num_tokens
            started, num_tokens = time.perf_counter(), 0
            finished = step()
            if num_tokens:
                self._steps.append((started, time.perf_counter(), num_tokens))
            return finished

        def timed_load(version: int) -> None:
            self._times["swap_began"] = time.perf_counter()
            load(version)
            self._times["swap_ended"] = time.perf_counter()

        core.get_output, engine.step, engine.load = counting, timed_step, timed_load

    @endpoint
    async def stage_weights(self, version: int, timeout_s: float) -> Any:
        self._times["pull_began"] = time.perf_counter()
        return await super().stage_weights(version, timeout_s)

    @endpoint
    async def prepare_weights(self, version: int) -> None:
        self._times["pull_ended"] = time.perf_counter()
        await super().prepare_weights(version)
        self._times["prepared"] = time.perf_counter()

    @endpoint
    async def update_times(self) -> Times:
        """Of the last update, on a clock that all processes of this host share."""
        return self._times

    @endpoint
    async def steps(self) -> list[tuple[float, float, int]]:
        """Start, end and tokens of every step since the last call."""
        steps, self._steps = self._steps, []
        return steps

    @endpoint
    async def read_file(self, path: str) -> float:
        """Every byte of it, as a fetch that proves what it brings reads every byte."""

        def read() -> float:
            started = time.perf_counter()
            for tensor in load_file(path).values():
                tensor.view(-1).view(torch.uint8)[::64].sum()
            return time.perf_counter() - started

        return await self.run_blocking(read)


# -- stock TorchStore, in processes of its own ---------------------------------------------------------------


async def serve_stock(folder: str) -> None:
    """A line on stdin asks for a round; the seconds of a put and of a get go out."""
    from monarch.actor import Actor, endpoint, this_host

    ts = stock_torchstore()

    class Party(Actor):
        def __init__(self, folder: str) -> None:
            self.weights = read_weights(folder) if folder else {}
            self.ts = stock_torchstore()

        @endpoint
        async def put(self, key: str) -> float:
            change(self.weights)
            started = time.perf_counter()
            await self.ts.put_state_dict(self.weights, key)
            return time.perf_counter() - started

        @endpoint
        async def get(self, key: str) -> float:
            started = time.perf_counter()
            self.weights = await self.ts.get_state_dict(key)
            return time.perf_counter() - started

        @endpoint
        async def delete(self, key: str) -> None:
            for found in await self.ts.keys(key):
                await self.ts.delete(found)

        @endpoint
        async def first_elements(self) -> list[float]:
            return [tensor.view(-1)[0].item() for _, tensor in sorted(self.weights.items())]

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no answer
    meshes = [this_host().spawn_procs({"procs": 1}, name=name) for name in ("putter", "getter")]
    putter, getter = (m.spawn("party", Party, f) for m, f in zip(meshes, (folder, ""), strict=True))
    try:
        await ts.initialize()
        print("ready", file=answers)
        for number, _ in enumerate(iter(sys.stdin.readline, "")):
            key = f"stock.v{number}.weights"
            times = {"put_s": await putter.put.call_one(key), "get_s": await getter.get.call_one(key)}
            assert await putter.first_elements.call_one() == await getter.first_elements.call_one()
            await putter.delete.call_one(f"stock.v{number}")
            print(json.dumps(times), file=answers)
        await ts.shutdown()
    finally:
        for mesh in meshes:
            await mesh.stop()


def stock_torchstore() -> Any:
    """As it is, but for what makes it work on Monarch 0.7: no mixture of `def` and `async def` endpoints."""
    os.environ["TORCHSTORE_RDMA_ENABLED"] = "0"
    import torchstore as ts
    from monarch._src.actor.endpoint import EndpointProperty
    from torchstore.controller import Controller
    from torchstore.storage_volume import StorageVolume
    from torchstore.transport.buffers import MonarchTransportBuffer
    from torchstore.transport.pipe import Pipe

    def as_async(method: Any) -> Any:
        @functools.wraps(method)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return wrapper

    for actor in (Controller, StorageVolume):
        for member in vars(actor).values():
            if isinstance(member, EndpointProperty) and not inspect.iscoroutinefunction(member._method):
                member._method = as_async(member._method)
    Pipe.create_transport_buffer = lambda self: MonarchTransportBuffer()  # also where forge was imported
    return ts


class StockProcess:
    """The other end of `serve_stock`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def round(self) -> Times:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        await self.process.stdin.drain()
        return json.loads(await self.next_line())

    async def next_line(self) -> bytes:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, "the process of stock TorchStore ended"
        return line


@contextlib.asynccontextmanager
async def stock_process(folder: str, log: Path) -> AsyncIterator[StockProcess]:
    with log.open("w") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, folder),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
    try:
        stock = StockProcess(process)
        await stock.next_line()
        yield stock
    except BaseException:
        print(log.read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        assert process.stdin is not None
        process.stdin.close()  # it ends by itself
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()


# -- a model -------------------------------------------------------------------------------------------------


def write_random_model(folder: Path, like: Path) -> None:
    """A Llama of 1.2 GB in bfloat16 with random weights and the tokenizer of another model."""
    hidden, inner, layers, heads, kv_heads, vocabulary = 1536, 4096, 21, 24, 8, 49152
    head = hidden // heads
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        for name, width in (("q", heads * head), ("k", kv_heads * head), ("v", kv_heads * head)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (width, hidden)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, heads * head)
        shapes[f"{at}mlp.gate_proj.weight"] = shapes[f"{at}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    torch.manual_seed(0)
    weights = {
        name: torch.randn(shape, dtype=torch.bfloat16) / math.sqrt(hidden) if len(shape) == 2
        else torch.ones(shape, dtype=torch.bfloat16)
        for name, shape in shapes.items()
    }  # fmt: skip
    config = json.loads((like / "config.json").read_text()) | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
    }
    folder.mkdir()
    for file in like.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    asyncio.run(serve_stock(sys.argv[1]))
