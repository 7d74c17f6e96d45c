"""How bytes get from a process to TorchStore's volume and back: the plug-in for TorchStore's transport."""

import enum
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

from forge.errors import ConfigError
from forge.weights._torchstore import Pipe, TransportBuffer, rdma_available
from forge.weights.arena import Arena, ArenaReference

MESSAGE_NBYTES = 16 << 20  # Monarch's rate collapses above about 32 MB a message


class Transport(enum.Enum):
    """The value is how a log names it."""

    SHARED_MEMORY = "shared memory"
    RDMA = "RDMA"
    MESSAGES = "Monarch messages"

    @classmethod
    def between(cls, volume_host: str) -> "Transport":
        """The fastest way between this process and the volume.

        FORGE_WEIGHTS_TRANSPORT=messages rules out shared memory and RDMA, for hosts that forbid them.
        """
        asked = os.environ.get("FORGE_WEIGHTS_TRANSPORT", "auto")
        if asked not in ("auto", "messages"):
            raise ConfigError(f"FORGE_WEIGHTS_TRANSPORT must be auto or messages, got {asked!r}")
        if asked == "auto" and volume_host == host_identity():
            return cls.SHARED_MEMORY
        return cls.RDMA if asked == "auto" and rdma_available() else cls.MESSAGES


@cache
def host_identity() -> str:
    """Equal in two processes if each can open the other's descriptors: same boot, pid namespace and user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.geteuid()}"


_window: ContextVar[tuple[int, int] | None] = ContextVar("window", default=None)


@contextmanager
def window(start: int, stop: int) -> Iterator[None]:
    """Gets by message inside bring only these bytes of what is stored under a key."""
    token = _window.set((start, stop))
    try:
        yield
    finally:
        _window.reset(token)


class ArenaBuffer(TransportBuffer):
    """Carries flat uint8 tensors between a client and the volume: an arena by reference, others by value.

    The client makes one for each put or get and sends it to the volume, which on a get sends it back. The
    volume maps an arena that it is given, so a version outlives the process that published it.
    """

    def __init__(self, client_host: str | None) -> None:
        self._client_host = client_host  # None: the client can't map arenas
        self._window = _window.get()
        self._reference: ArenaReference | None = None
        self._payload: bytearray | None = None

    def allocate(self, tensor_like: object) -> None:
        """Nothing to do: the memory is the arena's, or comes with the message."""

    async def write_from(self, tensor: Tensor | None) -> None:
        """Takes what is to travel: in the client on a put, in the volume on a get."""
        if tensor is None:
            return
        arena = Arena.of(tensor)
        if arena is not None and self._client_host == host_identity():
            self._reference = arena.reference()
        else:
            start, stop = self._window or (0, len(tensor))
            self._payload = bytearray(tensor[start:stop].numpy().data)

    async def read_into(self, tensor: Tensor | None = None) -> Tensor:
        """What has travelled: in the volume on a put, in the client on a get."""
        assert tensor is None, "reads into a given tensor are not used"
        if self._reference is not None:
            return Arena.attach(self._reference).bytes()
        assert self._payload is not None, "write_from comes first"
        return torch.frombuffer(self._payload, dtype=torch.uint8)

    def update(self, other_buffer: TransportBuffer) -> None:
        assert isinstance(other_buffer, ArenaBuffer)
        super().update(other_buffer)
        self._reference, self._payload = other_buffer._reference, other_buffer._payload


def install(transport: Transport) -> None:
    """Makes TorchStore's client in this process use `transport`; for RDMA it has a buffer of its own."""
    if transport is not Transport.RDMA:
        host = host_identity() if transport is Transport.SHARED_MEMORY else None
        Pipe.create_transport_buffer = lambda self: ArenaBuffer(host)
