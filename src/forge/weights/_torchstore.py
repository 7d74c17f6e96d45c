"""The only door to TorchStore: imports what is used of it, and only of the one version that is known.

Used are its volumes and its pipe to them. Its controller, which Monarch 0.7 can't spawn, is not: the registry
knows which keys are where.
"""

import importlib.metadata
import os

from forge.errors import ConfigError

TORCHSTORE_VERSION = "0.1.2"

if (_found := importlib.metadata.version("torchstore")) != TORCHSTORE_VERSION:
    raise ConfigError(
        f"forge works with torchstore {TORCHSTORE_VERSION}, {_found} is installed: "
        f"pip install torchstore=={TORCHSTORE_VERSION}"
    )
# Where this is unset TorchStore sets it and, beside that, installs a handler on the root logger. The value is
# Monarch's own default, 10 GiB.
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(10 << 30))

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError  # noqa: E402
from monarch.actor import (  # noqa: E402
    Actor,
    ActorError,
    HostMesh,
    MeshFailure,
    ProcMesh,
    concurrent_endpoint,
    endpoint,
    get_or_spawn_controller,
    this_host,
)
from monarch.config import configure  # noqa: E402
from monarch.rdma import RDMABuffer, is_ibverbs_available  # noqa: E402
from torchstore.storage_volume import InMemoryStore, StorageVolume  # noqa: E402
from torchstore.transport.buffers import TransportBuffer  # noqa: E402
from torchstore.transport.pipe import Pipe, Request  # noqa: E402

__all__ = [
    "Actor",
    "ActorError",
    "HostMesh",
    "InMemoryStore",
    "MeshFailure",
    "Pipe",
    "ProcMesh",
    "RDMABuffer",
    "Request",
    "StorageVolume",
    "SupervisionError",
    "TransportBuffer",
    "concurrent_endpoint",
    "configure",
    "endpoint",
    "get_or_spawn_controller",
    "is_ibverbs_available",
    "this_host",
]
