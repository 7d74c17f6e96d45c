"""Courier: brings a rank's arena to its volume, and what a reader wants of a version from the volumes."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forge.errors import WeightsMismatch
from forge.weights.assembly import Assembly, Source, batches
from forge.weights.box import Box
from forge.weights.buffers import (
    MessageGet,
    MessagePut,
    Place,
    RdmaGet,
    RdmaPut,
    ReferenceBuffer,
    ReferenceGet,
    travelling_by,
)
from forge.weights.manifest import Manifest, Shards
from forge.weights.part import Part
from forge.weights.threads import in_thread
from forge.weights.transport import Transport

BATCH_NBYTES = 16 << 20
"""Of one put or get between hosts. Monarch's rate collapses above about 32 MB a message; RDMA through TCP is
no faster with more.
"""
_IN_FLIGHT = 4  # puts or gets of one part at a time
_NEAREST_FIRST = (Transport.SHARED_MEMORY, Transport.RDMA, Transport.MESSAGES)

received_nbytes: Counter[Transport] = Counter()
"""Bytes of tensors that came to this process by RDMA and by messages, since it began."""


@dataclass(frozen=True, slots=True)
class StoredArena:
    """A part, and how to ask TorchStore for it."""

    part: Part
    host: str  # host_identity of the volume's process
    get: Callable[[], Awaitable[Tensor]]  # TorchStore's get of any key of the part


async def store(arena: Tensor, host: str, put: Callable[[int, Tensor], Awaitable[None]]) -> None:
    """Puts an arena, [nbytes] uint8, into a volume on `host`; nothing where it is empty.

    put: TorchStore's put of the chunk of a number under a key of its own; messages take one for each batch,
    other ways one for all. Any of the keys stands for the whole arena in a get. An arena that a volume on the
    same host gets must be memory of an `Arena`, which the volume then shares: it must not change any more.
    """
    if not len(arena):
        return
    transport = Transport.between(host)
    if transport is not Transport.MESSAGES:
        with travelling_by(ReferenceBuffer() if transport is Transport.SHARED_MEMORY else RdmaPut()):
            return await put(0, arena)
    transfer = uuid.uuid4().hex
    free = asyncio.Semaphore(_IN_FLIGHT)

    async def put_chunk(number: int, start: int) -> None:
        async with free:
            with travelling_by(MessagePut(Place(transfer, start, len(arena)))):
                await put(number, arena[start : start + BATCH_NBYTES])

    starts = range(0, len(arena), BATCH_NBYTES)
    await _all(*(put_chunk(number, start) for number, start in enumerate(starts)))


async def read(
    manifest: Manifest, stored: Sequence[StoredArena], boxes: Mapping[str, Box] | None = None
) -> Shards:
    """Boxes of tensors, by name, of the version that `stored` are all parts of; None: all tensors, whole.

    Of what lies on this host no byte is moved, of the rest just the bytes of the boxes. What several parts
    have comes from the nearest. Raises WeightsMismatch as `Assembly` does.
    """
    stored = sorted(stored, key=lambda arena: _NEAREST_FIRST.index(Transport.between(arena.host)))
    assembly = await in_thread(Assembly, manifest, [arena.part for arena in stored], boxes)
    await _all(*(_read_one(assembly, number, arena) for number, arena in enumerate(stored)))
    try:
        return await in_thread(assembly.finish)
    except WeightsMismatch as error:
        raise damaged(manifest.version, error) from None


def damaged(version: int, error: WeightsMismatch) -> WeightsMismatch:
    """What was stored is wrong, not what was asked for."""
    return WeightsMismatch(f"version {version} of the weights is damaged: {error}")


async def _read_one(assembly: Assembly, number: int, stored: StoredArena) -> None:
    sources = assembly.sources(number)
    if not sources:
        return
    transport = Transport.between(stored.host)
    if transport is Transport.SHARED_MEMORY:
        with travelling_by(ReferenceGet()):
            arena = await stored.get()
        return await in_thread(assembly.take_arena, number, arena)
    make = RdmaGet if transport is Transport.RDMA else MessageGet
    free = asyncio.Semaphore(_IN_FLIGHT)

    async def get(batch: Sequence[Source]) -> None:
        async with free:
            with travelling_by(make([source.cut for source in batch])):
                packed = await stored.get()
            received_nbytes[transport] += len(packed)
            await in_thread(assembly.take, batch, packed)

    await _all(*(get(batch) for batch in batches(sources, BATCH_NBYTES)))


async def _all(*awaitables: Coroutine[Any, Any, None]) -> None:
    """When one fails, returns after the others have ended too: none touches memory that is freed then."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
