"""Push: one rank's part of a version on its way to the store."""

import logging
import pickle
from collections.abc import Mapping

import torch
from torch import Tensor

from forge.errors import ForgeError, WeightsMissing
from forge.weights import courier
from forge.weights._torchstore import ActorError, SupervisionError
from forge.weights.arena import Arena, ArenaPool
from forge.weights.keys import PartKey
from forge.weights.part import Change, Part, pack, plan_pieces
from forge.weights.process import Process
from forge.weights.registry import StoredPart
from forge.weights.store import Store, ask, connect
from forge.weights.threads import in_thread
from forge.weights.volumes import volume_host

logger = logging.getLogger(__name__)

_pool = ArenaPool()


class Push:
    """Begun by `begin_push`; packed once, then published once."""

    def __init__(self, store: Store, key: PartKey) -> None:
        self._store = store
        self._key = key
        self._packed: tuple[Arena, Part] | None = None

    @torch.no_grad()
    def pack(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype | None = None,
        change: Change | None = None,
    ) -> None:
        """Copies plain tensors, or the local shards of DTensors. They may change afterwards.

        dtype: what floating point tensors are cast to. change: what is stored in place of each of them, made
        when its turn comes. May run in any thread.
        """
        assert self._packed is None, "a push is packed once"
        placed, nbytes = plan_pieces(tensors, dtype)
        arena = _pool.take(nbytes)
        part = pack(placed, arena.bytes(), change)
        arena.release()
        self._packed = arena, part

    async def publish(self) -> None:
        """Stores what was packed. Who waits for the version hears of an error at once."""
        assert self._packed is not None, "pack comes first"
        arena, part = self._packed
        try:
            await ask(self._store.registry.publish, await self._store_part(arena, part))
        except BaseException as error:
            await self.fail(error)
            raise
        finally:
            _pool.give_back(arena)

    async def fail(self, error: BaseException) -> None:
        """Tells all who wait for the version that this rank's part won't come, and why."""
        try:
            await ask(self._store.registry.fail, self._key, f"{type(error).__name__}: {error}")
        except (ForgeError, ActorError, SupervisionError) as unheard:
            logger.warning("%s; the registry can't be told: %s", error, unheard)

    async def _store_part(self, arena: Arena, part: Part) -> StoredPart:
        """A volume that has died since the last push is replaced by another, once."""
        volume = await self._store.home(self._key.rank)
        try:
            await self._put(volume, arena, part.layout.nbytes)
        except WeightsMissing:
            if not await self._store.lose(volume):
                raise
            volume = await self._store.home(self._key.rank)
            await self._put(volume, arena, part.layout.nbytes)
        return StoredPart(self._key, volume, pickle.dumps(part))

    async def _put(self, volume: str, arena: Arena, nbytes: int) -> None:
        client = await self._store.volume(volume)
        used = arena.bytes()[:nbytes]
        await courier.store(used, volume_host(volume), lambda i, part: client.put(self._key.arena(i), part))


async def begin_push(version: int, *, rank: int, world_size: int, publisher: str = "the trainer") -> Push:
    """Claims this rank's part of a version, which is immutable: to publish one again, retire it first.

    publisher: how errors name who pushes. Raises ForgeError when the part was claimed before.
    """
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    store = await connect()
    key = await ask(store.registry.begin, version, rank, world_size, publisher, Process.this())
    push = Push(store, key)
    try:
        await store.home(rank)  # where there is none yet it starts while this push is packed
    except BaseException as error:
        await push.fail(error)
        raise
    return push


async def publish(
    version: int,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    world_size: int,
    publisher: str = "the trainer",
) -> None:
    """Stores this rank's part of a version: plain tensors, or the local shards of DTensors, by name.

    Every rank of the trainer calls it. When it returns, the part is stored and the tensors may change. A
    version is there for readers once all `world_size` ranks have published. Raises as `begin_push` does.
    """
    push = await begin_push(version, rank=rank, world_size=world_size, publisher=publisher)
    try:
        await in_thread(push.pack, tensors)
    except BaseException as error:
        await push.fail(error)
        raise
    await push.publish()
