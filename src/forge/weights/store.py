"""The store: opened and closed in the root process, found from any other.

Nothing of it can outlive the run, and so nothing need be swept up after one that was killed: the volumes end
with the root process or with their host's, and memory for weights has no name in any file system.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

from forge.errors import ForgeError
from forge.weights._torchstore import HostMesh, get_or_spawn_controller, is_ibverbs_available, this_host
from forge.weights.process import Process
from forge.weights.registry_actor import RegistryActor
from forge.weights.transport import HOST_VARIABLE, Transport, rdma_wish
from forge.weights.volume_client import VolumeClient, forge_errors
from forge.weights.volumes import volume_host, volume_name

logger = logging.getLogger(__name__)

_NAME = "forge.weights"  # of the registry among Monarch's controllers
_STOP_S = 20.0
_is_open = False  # in the root process
_lock = asyncio.Lock()
_logged: set[Transport] = set()


class Store:
    """What a process knows of the store: the registry, and clients of the volumes it has met."""

    def __init__(self, registry: RegistryActor) -> None:
        self.registry = registry
        self._clients: dict[str, VolumeClient] = {}
        self._home: str | None = None

    async def home(self, rank: int) -> str:
        """Id of the volume that this process publishes to. It is started if need be, which is not awaited."""
        if self._home is None:
            name = os.environ.get(HOST_VARIABLE)
            self._home = await ask(self.registry.choose_volume, Process.this(), rank, this_host(), name)
        assert self._home is not None
        return self._home

    async def volume(self, volume: str) -> VolumeClient:
        """Waits until it has started. Raises WeightsMissing when it is gone."""
        if volume not in self._clients:
            actor = await ask(self.registry.volume, volume)
            self._clients[volume] = VolumeClient(volume, actor)
            transport = Transport.between(volume_host(volume))
            if transport not in _logged:
                _logged.add(transport)
                logger.info("weights travel to and from %s by %s", volume_name(volume), transport.value)
        return self._clients[volume]

    async def lose(self, volume: str) -> bool:
        """This process gets no answer from a volume. Whether it is gone, and another to be had."""
        if not await ask(self.registry.lost, volume, f"process {os.getpid()} gets no answer"):
            return False
        self._clients.pop(volume, None)
        if self._home == volume:
            self._home = None
        return True


_store: Store | None = None  # once this process is connected


async def connect() -> Store:
    """Finds the store from any process of the job. Who asks it when none is open gets a ForgeError."""
    global _store
    if _store is None:
        _store = Store(await get_or_spawn_controller(_NAME, RegistryActor))
    return _store


async def ask(endpoint: Any, *args: object) -> Any:
    """Calls an endpoint of the registry; raises what it raises."""
    with forge_errors():
        return await endpoint.call_one(*args)


async def open_store(hosts: Sequence[HostMesh] | None = None) -> None:
    """Starts the store. Call it in the root process; a second call does nothing.

    hosts: hosts for the volumes, the processes that hold the weights; None: each publisher's own host gets
    one with its first push. How weights travel to and from them: see `Transport.between`. Raises ConfigError
    for a TORCHSTORE_USE_RDMA that it doesn't know.
    """
    global _is_open
    wish = rdma_wish()
    async with _lock:
        if _is_open:
            return
        store = await connect()
        await ask(store.registry.open_store, hosts)
        _is_open = True
        if wish == "1" and not is_ibverbs_available():
            logger.warning(
                "TORCHSTORE_USE_RDMA=1, but there is no RDMA hardware: Monarch uses TCP instead between hosts"
            )


async def close_store() -> None:
    """Ends the store and its processes; all versions are gone. Does nothing where no store is open."""
    global _is_open, _store, _lock
    async with _lock:
        if not _is_open:
            return
        _is_open = False
        store, _store = await connect(), None
        try:
            await asyncio.wait_for(ask(store.registry.close_store), _STOP_S)
        except TimeoutError:
            raise ForgeError(f"the volumes of the weights have not ended within {_STOP_S:g} s") from None
        finally:
            _lock = asyncio.Lock()  # the next store may belong to another event loop, this one to its first
