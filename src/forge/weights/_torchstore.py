"""The only door to TorchStore: imports the one version that is known, made to work on Monarch 0.7.

Monarch 0.7 refuses to spawn, or to unpickle a handle of, an actor that mixes `def` and `async def`
endpoints; TorchStore 0.1.2's Controller does. Its `def` endpoints never block, so each is wrapped in an
`async def`. Every process that talks to the store needs this, hence it happens at import.
"""

import functools
import importlib.metadata
import inspect
import os
from typing import Any

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

import torchstore as ts  # noqa: E402
from monarch._src.actor.endpoint import EndpointProperty  # noqa: E402
from monarch.actor import ActorError, ProcMesh, this_host  # noqa: E402
from torchstore.controller import Controller  # noqa: E402
from torchstore.storage_volume import StorageVolume  # noqa: E402
from torchstore.transport.buffers import TransportBuffer, rdma_available  # noqa: E402
from torchstore.transport.pipe import Pipe  # noqa: E402


def _make_endpoints_async(actor_class: type) -> None:
    for member in vars(actor_class).values():
        if isinstance(member, EndpointProperty) and not inspect.iscoroutinefunction(member._method):
            member._method = _as_async(member._method)


def _as_async(method: Any) -> Any:
    @functools.wraps(method)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


_make_endpoints_async(Controller)
_make_endpoints_async(StorageVolume)

__all__ = [
    "ActorError",
    "Pipe",
    "ProcMesh",
    "TransportBuffer",
    "rdma_available",
    "this_host",
    "ts",
]
