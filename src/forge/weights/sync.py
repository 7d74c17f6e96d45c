"""fetch, retire, versions: what readers of the weights see."""

import asyncio
import itertools
import logging
import pickle
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

from torch import Tensor

from forge.errors import WeightsMismatch, WeightsMissing
from forge.weights import courier
from forge.weights.box import Box
from forge.weights.manifest import Manifest, Shards
from forge.weights.part import Part
from forge.weights.process import Process
from forge.weights.registry import HOLD_S, Reader, StoredPart
from forge.weights.registry_actor import Held
from forge.weights.store import Store, ask, connect
from forge.weights.threads import in_thread
from forge.weights.transport import Transport
from forge.weights.volumes import volume_host

logger = logging.getLogger(__name__)

_serial = itertools.count()


async def fetch(version: int, timeout_s: float = 60.0) -> dict[str, Tensor]:
    """All tensors of a version, whole, on the CPU, proven by their fingerprints to be what was published.

    Waits until all ranks have published it. On the publisher's host, tensors that one rank holds whole are
    views of shared memory, mapped as long as one of them lives; writing to them changes this process's copy
    only. Raises WeightsMissing when the version isn't complete in time, naming the ranks that are missing;
    at once when its push failed, or it is retired or lost; WeightsMismatch, naming the tensor, when something
    else arrives.
    """
    return (await fetch_shards(version, None, timeout_s)).tensors


async def fetch_shards(
    version: int, boxes: Mapping[str, Box] | None = None, timeout_s: float = 60.0
) -> Shards:
    """Boxes of tensors of a version, proven as far as one reader can; None: all tensors, whole.

    The claims of all readers together prove the rest: see `Manifest.prove`. Raises as `fetch` does, and
    WeightsMismatch for a name that was not published or a box outside of its tensor.
    """
    store = await connect()
    reader = Reader(Process.this(), next(_serial))
    async with _hold(store, version, reader, timeout_s) as held:
        try:
            shards = await _read(store, version, held, boxes)
        except Exception as error:
            gone = await ask(store.registry.let_go, version, reader)
            if gone is not None:
                raise WeightsMissing(gone) from error
            raise
        if not _is_proven(shards, held):
            gone = await ask(store.registry.let_go, version, reader)
            if gone is not None:
                raise WeightsMissing(gone)
    return shards


def _is_proven(shards: Shards, held: Held) -> bool:
    """Whether what was read is right even if the version was retired before the end.

    Memory that is mapped can't change, but it may have been written again before it was mapped: then only
    the fingerprints of whole tensors tell.
    """
    facts = shards.manifest.tensors
    whole = all(claim.box == Box.whole(facts[name].shape) for name, claim in shards.claims.items())
    return whole and all(
        Transport.between(volume_host(part.volume)) is Transport.SHARED_MEMORY for part in held.parts
    )


@asynccontextmanager
async def _hold(store: Store, version: int, reader: Reader, timeout_s: float) -> AsyncIterator[Held]:
    """Keeps a version from being retired inside."""
    renewing = None
    try:
        held = await ask(store.registry.hold, version, reader, timeout_s)
        renewing = asyncio.create_task(_renew(store, version, reader))
        yield held
    finally:
        store.registry.let_go.broadcast(version, reader)  # nobody need wait for it
        if renewing is not None:
            renewing.cancel()
            await asyncio.wait([renewing])
            if not renewing.cancelled() and (error := renewing.exception()) is not None:
                logger.warning("the hold of version %d of the weights was not renewed: %r", version, error)


async def _renew(store: Store, version: int, reader: Reader) -> None:
    while True:
        await asyncio.sleep(HOLD_S / 3)
        await ask(store.registry.renew, version, reader)


async def _read(store: Store, version: int, held: Held, boxes: Mapping[str, Box] | None) -> Shards:
    parts, manifest = await in_thread(_unpack, version, held)
    stored = [
        courier.StoredArena(index, volume_host(part.volume), partial(_get, store, part, index.layout.nbytes))
        for part, index in zip(held.parts, parts, strict=True)
    ]
    return await courier.read(manifest, stored, boxes)


def _unpack(version: int, held: Held) -> tuple[list[Part], Manifest]:
    parts = [pickle.loads(part.index) for part in held.parts]
    try:
        return parts, Manifest.of(version, parts, held.publisher)
    except WeightsMismatch as error:
        raise courier.damaged(version, error) from None


async def _get(store: Store, part: StoredPart, nbytes: int) -> Tensor:
    client = await store.volume(part.volume)
    try:
        return await client.get(part.key.arena(0), nbytes)
    except WeightsMissing:
        await store.lose(part.volume)
        raise


async def retire(version: int, timeout_s: float = 30.0) -> None:
    """Deletes a version, or what there is of it. Tensors that were fetched stay valid.

    Lets no new reader in, and waits for those that are reading, at most `timeout_s`: their fetches then raise
    WeightsMissing, or end well. Readers that have died are not waited for, those on other hosts at most 10 s.
    """
    store = await connect()
    await ask(store.registry.retire, version, timeout_s)


async def versions() -> list[int]:
    """The versions that readers can have: of which all ranks' parts are in the store, ascending."""
    store = await connect()
    complete, _ = await ask(store.registry.versions)
    return complete


async def unfinished() -> list[int]:
    """The versions of which there is something, but which readers can't have, ascending.

    They are being published or retired, or their push failed, or whoever did so is gone: then `retire`
    removes what is left.
    """
    store = await connect()
    _, unfinished = await ask(store.registry.versions)
    return unfinished


async def newest_lost() -> tuple[int, str] | None:
    """The newest version that was complete and is lost with its volume, and why; None where one as new is
    complete since, or none was lost."""
    store = await connect()
    return await ask(store.registry.newest_lost)
