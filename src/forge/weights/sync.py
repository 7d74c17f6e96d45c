"""publish, fetch, retire: a version of the weights on its way from the trainer's ranks to any reader."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from forge.errors import ForgeError, WeightsMismatch, WeightsMissing
from forge.weights._torchstore import ActorError, ts
from forge.weights.arena import Arena, ArenaPool
from forge.weights.assembly import assemble
from forge.weights.keys import (
    PREFIX,
    PartKey,
    missing_ranks,
    published_parts,
    stored_versions,
    version_prefix,
)
from forge.weights.manifest import Part, pack, plan_pieces
from forge.weights.store import connect
from forge.weights.transport import MESSAGE_NBYTES, Transport, window

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MESSAGES_IN_FLIGHT = 4
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.01, 0.5
_pool = ArenaPool()


async def publish(version: int, tensors: Mapping[str, Tensor], *, rank: int, world_size: int) -> None:
    """Stores this rank's part of a version: plain tensors, or the local shards of DTensors, by name.

    Every rank of the trainer calls it. When it returns, the part is stored and the tensors may change. A
    version is there for readers once all `world_size` ranks have published. A version is immutable: to
    publish one again, retire it first. Raises ForgeError when it is already there.
    """
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    transport = await connect()
    key = PartKey(version, rank, world_size)
    others = await _parts_of(version)
    if key in others or any(other.world_size != world_size for other in others):
        there = ", ".join(f"rank {k.rank} of {k.world_size}" for k in others)
        raise ForgeError(
            f"version {version} of the weights is already published by {there}: versions are immutable, "
            "retire it or publish another version"
        )
    arena, part = await _in_thread(_pack, tensors, transport)
    try:
        await _put_chunks(key, part, arena)
        await ts.put(key.index, part)
    finally:
        owner = Arena.of(arena)
        if owner is not None:
            _pool.give_back(owner)


async def fetch(version: int, timeout_s: float = 60.0) -> dict[str, Tensor]:
    """All tensors of a version, whole, on the CPU, proven by their fingerprints to be what was published.

    Waits until all ranks have published it. On the publisher's host, tensors that one rank holds whole are
    views of shared memory, mapped as long as one of them lives; writing to them changes this process's copy
    only. Raises WeightsMissing when the version isn't complete in time, naming the ranks that are missing,
    or is retired meanwhile; WeightsMismatch, naming the tensor, when something else arrives.
    """
    transport = await connect()
    keys = await _await_complete(version, timeout_s)
    try:
        parts = await asyncio.gather(*(_get_part(key, transport) for key in keys))
        return await _in_thread(assemble, parts)
    except (KeyError, ActorError, WeightsMissing, WeightsMismatch) as error:
        if set(keys) - set(await _parts_of(version)):
            raise WeightsMissing(f"version {version} of the weights was retired meanwhile") from error
        if isinstance(error, WeightsMismatch):
            raise WeightsMismatch(f"version {version} of the weights is damaged: {error}") from None
        raise


async def retire(version: int) -> None:
    """Deletes a version, or what there is of it. Tensors that were fetched stay valid."""
    await connect()
    keys = await ts.keys(version_prefix(version))
    await asyncio.gather(*(ts.delete(key) for key in keys if key.endswith(".index")))
    await asyncio.gather(*(ts.delete(key) for key in keys if not key.endswith(".index")))


async def versions() -> list[int]:
    """The versions of which all ranks' parts are in the store, ascending."""
    await connect()
    found = published_parts(await ts.keys(PREFIX))
    return [version for version, parts in found.items() if not missing_ranks(parts)]


async def unfinished() -> list[int]:
    """The versions of which the store holds something, but not all ranks' parts, ascending.

    They are being published or retired, or whoever did so is gone: then `retire` removes what is left.
    """
    await connect()
    keys = await ts.keys(PREFIX)
    whole = {version for version, parts in published_parts(keys).items() if not missing_ranks(parts)}
    return sorted(stored_versions(keys) - whole)


@torch.no_grad()
def _pack(tensors: Mapping[str, Tensor], transport: Transport) -> tuple[Tensor, Part]:
    placed, nbytes = plan_pieces(tensors)
    if transport is Transport.SHARED_MEMORY:
        owner = _pool.take(nbytes)
        arena, pieces = owner.bytes(), pack(placed, owner.bytes())
        owner.release()
    else:
        arena = torch.empty(nbytes, dtype=torch.uint8)
        pieces = pack(placed, arena)
    chunk_nbytes = MESSAGE_NBYTES if transport is Transport.MESSAGES else len(arena)
    return arena, Part(pieces, len(arena), chunk_nbytes)


async def _put_chunks(key: PartKey, part: Part, arena: Tensor) -> None:
    free = asyncio.Semaphore(_MESSAGES_IN_FLIGHT)

    async def put(i: int) -> None:
        async with free:
            await ts.put(key.arena(i), arena[i * part.chunk_nbytes : (i + 1) * part.chunk_nbytes])

    await asyncio.gather(*(put(i) for i in range(part.num_chunks)))


async def _get_part(key: PartKey, transport: Transport) -> tuple[Part, Tensor]:
    part = await ts.get(key.index)
    assert isinstance(part, Part)
    if part.num_chunks == 1 and transport is not Transport.MESSAGES:
        return part, await ts.get(key.arena(0))
    arena = torch.empty(part.nbytes, dtype=torch.uint8)
    free = asyncio.Semaphore(_MESSAGES_IN_FLIGHT)

    async def get(chunk: int, start: int, stop: int) -> None:
        first = chunk * part.chunk_nbytes
        async with free:
            with window(start, stop):
                arena[first + start : first + stop] = await ts.get(key.arena(chunk))

    await asyncio.gather(*(get(*read) for read in _reads(part)))
    return part, arena


def _reads(part: Part) -> list[tuple[int, int, int]]:
    """(chunk, first byte in it, end in it) of every message that brings a part."""
    reads = []
    for chunk in range(part.num_chunks):
        size = min(part.chunk_nbytes, part.nbytes - chunk * part.chunk_nbytes)
        reads += [(chunk, s, min(s + MESSAGE_NBYTES, size)) for s in range(0, size, MESSAGE_NBYTES)]
    return reads


async def _parts_of(version: int) -> list[PartKey]:
    return published_parts(await ts.keys(version_prefix(version))).get(version, [])


async def _await_complete(version: int, timeout_s: float) -> list[PartKey]:
    """Asks with growing pauses, since TorchStore can't tell when a key appears."""
    deadline = time.monotonic() + timeout_s
    wait_s = _FIRST_WAIT_S
    while True:
        parts = await _parts_of(version)
        if parts and not missing_ranks(parts):
            return parts
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise WeightsMissing(await _what_is_missing(version, parts, timeout_s))
        await asyncio.sleep(min(wait_s, left_s))
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


async def _what_is_missing(version: int, parts: list[PartKey], timeout_s: float) -> str:
    start = f"version {version} of the weights isn't in the store after {timeout_s:g} s: "
    if not parts:
        there = ", ".join(map(str, await versions())) or "none"
        return f"{start}no rank has published it (complete versions: {there})"
    ranks = ", ".join(map(str, missing_ranks(parts)))
    return f"{start}of {parts[0].world_size} ranks these have not published their part: {ranks}"


@cache
def _thread() -> ThreadPoolExecutor:
    """One thread for copies and fingerprints: the event loop stays free, torch makes its own threads once."""
    return ThreadPoolExecutor(1, thread_name_prefix="weights")


async def _in_thread(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_thread(), partial(function, *args, **kwargs))
