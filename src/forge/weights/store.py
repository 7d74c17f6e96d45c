"""The store: TorchStore with one volume, a process that holds all published versions."""

import asyncio
import logging
import os

from forge.errors import ForgeError
from forge.weights._torchstore import ActorError, ProcMesh, rdma_available, this_host, ts
from forge.weights.transport import Transport, host_identity, install

logger = logging.getLogger(__name__)

_STOP_S = 10.0
_volume: ProcMesh | None = None  # in the root process, between open_store and close_store
_transport: Transport | None = None  # of this process, once it is connected
_lock = asyncio.Lock()


class OneVolume(ts.SingletonStrategy):
    """All data in one volume, which is named by its host so that clients know whether they share memory."""

    @classmethod
    def get_volume_id(cls) -> str:
        return host_identity()

    @property
    def volume_id(self) -> str:
        (volume_id,) = self.volume_id_to_coord
        return volume_id

    def select_storage_volume(self):
        return self.get_storage_volume(self.volume_id), self.volume_id


async def open_store() -> None:
    """Starts the store. Call it in the root process; a second call does nothing.

    TORCHSTORE_USE_RDMA=1 asks for RDMA between hosts. Without RDMA hardware that is logged, and the weights
    travel by shared memory within a host and by messages between hosts.
    """
    global _volume
    async with _lock:
        if _volume is not None:
            return
        volume = this_host().spawn_procs({"procs": 1}, name="weights")
        try:
            await volume.initialized
            await ts.initialize(strategy=OneVolume(), mesh=volume)
        except BaseException:
            await volume.stop()
            raise
        _volume = volume
        if _choose_rdma() and not rdma_available():
            logger.warning("TORCHSTORE_USE_RDMA=1, but there is no RDMA hardware: going on without it")


async def close_store() -> None:
    """Ends the store and its process; all versions are gone. Does nothing where no store is open."""
    global _volume, _transport, _lock
    async with _lock:
        if _volume is None:
            return
        volume, _volume, _transport = _volume, None, None
        try:
            await asyncio.wait_for(ts.shutdown(), _STOP_S)
        finally:
            ts.reset_client()
            await asyncio.wait_for(volume.stop(), _STOP_S)
            _lock = asyncio.Lock()  # the next store may belong to another event loop, this one to its first


async def connect() -> Transport:
    """Finds the store from any process of the job; returns how weights travel between the two.

    Raises ForgeError when no store is open.
    """
    global _transport
    if _transport is None:
        _choose_rdma()
        try:
            client = await ts.client()
        except ActorError as error:
            raise ForgeError(
                "no weight store is open: call open_store() in the root process first"
            ) from error
        assert isinstance(client.strategy, OneVolume), f"the store was opened with {client.strategy}"
        _transport = Transport.between(client.strategy.volume_id)
        install(_transport)
        logger.info("weights travel by %s", _transport.value)
    return _transport


def _choose_rdma() -> bool:
    """Tells TorchStore, which would take RDMA wherever it finds it, whether the user asked for it."""
    asked = os.environ.get("TORCHSTORE_USE_RDMA", "0") == "1"
    os.environ["TORCHSTORE_RDMA_ENABLED"] = str(int(asked))
    return asked
