"""Buffers: how bytes get from a process to TorchStore's volume and back, the plug-in for its transport.

The client makes a buffer for each put or get, and sends it to the volume, which on a get sends it back. What
TorchStore stores under a key is always memory of an arena of the volume's process: one that it has mapped, or
one that it has filled with what came from another host.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from forge.weights._torchstore import Pipe, RDMABuffer, TransportBuffer, configure
from forge.weights.arena import Arena, ArenaReference
from forge.weights.attachments import Attachments
from forge.weights.cut import Cut, gather
from forge.weights.threads import in_thread

_RDMA_CHUNK_MB = 8  # two to three times as fast as Monarch's 64 MB where there is no RDMA hardware
_RDMA_WAIT_S, _RDMA_NBYTES_PER_S = 30, 50_000_000  # a peer that is slower than this is taken for dead


class _Buffer(TransportBuffer):
    """Does nothing, which is right for objects."""

    def allocate(self, tensor_like: object) -> None:
        """In the client, first."""

    async def write_from(self, tensor: Tensor | None) -> None:
        """Takes what is to travel: in the client on a put, in the volume on a get."""

    async def read_into(self, tensor: Tensor | None = None) -> Tensor:
        """What has travelled: in the volume on a put, in the client on a get."""
        raise AssertionError("objects don't travel in buffers")


class ReferenceBuffer(_Buffer):
    """Within a host: tells the other side where the arena is, which maps it. No byte is copied.

    A volume that maps the arena of a publisher keeps it when the publisher ends.
    """

    _reference: ArenaReference | None = None

    async def write_from(self, tensor: Tensor | None) -> None:
        if tensor is not None:
            self._reference = _arena_of(tensor).reference()

    async def read_into(self, tensor: Tensor | None = None) -> Tensor:
        assert self._reference is not None, "write_from comes first"
        return Arena.attach(self._reference).bytes()

    def update(self, other_buffer: TransportBuffer) -> None:
        assert isinstance(other_buffer, ReferenceBuffer)
        super().update(other_buffer)
        self._reference = other_buffer._reference


class ReferenceGet(ReferenceBuffer):
    """A reader comes back to the arenas of its publishers again and again."""

    async def read_into(self, tensor: Tensor | None = None) -> Tensor:
        assert self._reference is not None, "write_from comes first"
        return await in_thread(_attachments.attach, self._reference)


_attachments = Attachments()


@dataclass(frozen=True, slots=True)
class Place:
    """Where in an arena of the volume a put by message belongs."""

    transfer: str  # which arena: the same for all its puts, and for no other's
    start: int  # first byte
    nbytes: int  # of the whole arena


_arriving: WeakValueDictionary[str, Arena] = WeakValueDictionary()  # by transfer; lives as long as its keys


class MessagePut(_Buffer):
    """Bytes within the message. The puts of one arena may come in any order."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._payload = bytearray()

    async def write_from(self, tensor: Tensor | None) -> None:
        assert tensor is not None
        self._payload = bytearray(tensor.numpy().data)

    async def read_into(self, tensor: Tensor | None = None) -> Tensor:
        arena = _arriving.get(self._place.transfer)
        if arena is None:
            arena = _arriving[self._place.transfer] = _new_arena(self._place.nbytes)
        stored = arena.bytes()[self._place.start : self._place.start + len(self._payload)]
        return stored.copy_(torch.frombuffer(self._payload, dtype=torch.uint8))


class MessageGet(_Buffer):
    """The bytes of the cuts, one behind the other, within the reply."""

    def __init__(self, cuts: Sequence[Cut]) -> None:
        self._cuts = tuple(cuts)
        self._payload = bytearray()

    async def write_from(self, tensor: Tensor | None) -> None:
        assert tensor is not None
        self._payload = bytearray(_nbytes(self._cuts))
        gather(_arena_of(tensor).bytes(), self._cuts, torch.frombuffer(self._payload, dtype=torch.uint8))

    async def read_into(self, tensor: Tensor | None = None) -> Tensor:
        return torch.frombuffer(self._payload, dtype=torch.uint8)

    def update(self, other_buffer: TransportBuffer) -> None:
        assert isinstance(other_buffer, MessageGet)
        super().update(other_buffer)
        self._payload = other_buffer._payload


class _RdmaBuffer(_Buffer):
    """Memory of the client's that the volume reads or writes, registered from the first call to `drop`."""

    _remote: RDMABuffer | None = None
    _local: Tensor | None = None  # keeps the memory alive; stays in the client

    def _register(self, memory: Tensor) -> None:
        self._remote, self._local = RDMABuffer(memory), memory

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_local": None}

    async def drop(self) -> None:
        if self._remote is not None:
            remote, self._remote, self._local = self._remote, None, None
            await remote.drop()


class RdmaPut(_RdmaBuffer):
    """The volume reads the publisher's arena."""

    async def write_from(self, tensor: Tensor | None) -> None:
        assert tensor is not None
        self._register(tensor)

    async def read_into(self, tensor: Tensor | None = None) -> Tensor:
        assert self._remote is not None, "write_from comes first"
        _choose_chunks()
        memory = _new_arena(self._remote.size()).bytes()
        await self._remote.read_into(memory, timeout=_rdma_wait_s(len(memory)))
        return memory


class RdmaGet(_RdmaBuffer):
    """The volume writes the bytes of the cuts, one behind the other, into the reader's memory."""

    def __init__(self, cuts: Sequence[Cut]) -> None:
        self._cuts = tuple(cuts)

    def allocate(self, tensor_like: object) -> None:
        self._register(torch.empty(_nbytes(self._cuts), dtype=torch.uint8))

    async def write_from(self, tensor: Tensor | None) -> None:
        assert tensor is not None and self._remote is not None
        _choose_chunks()
        # memory of its own, also for a single cut: hardware may refuse to pin, or copy, a mapped file's pages
        packed = torch.empty(_nbytes(self._cuts), dtype=torch.uint8)
        gather(_arena_of(tensor).bytes(), self._cuts, packed)
        await self._remote.write_from(packed, timeout=_rdma_wait_s(len(packed)))
        self._remote = None  # the reply need not carry it

    async def read_into(self, tensor: Tensor | None = None) -> Tensor:
        assert self._local is not None, "allocate comes first"
        return self._local


_next: ContextVar[_Buffer | None] = ContextVar("next", default=None)


@contextmanager
def travelling_by(buffer: _Buffer) -> Iterator[None]:
    """The one put or get inside takes this buffer; outside of it only objects can be put and got."""
    token = _next.set(buffer)
    try:
        yield
    finally:
        _next.reset(token)


Pipe.create_transport_buffer = lambda self: _next.get() or _Buffer()


def _arena_of(tensor: Tensor) -> Arena:
    arena = Arena.of(tensor)
    assert arena is not None, "what is stored is memory of an arena"
    return arena


def _new_arena(nbytes: int) -> Arena:
    """One that readers may map at once: they hear of it only when it is full."""
    arena = Arena.create(nbytes)
    arena.release()
    return arena


def _nbytes(cuts: Sequence[Cut]) -> int:
    return sum(cut.nbytes for cut in cuts)


@cache
def _choose_chunks() -> None:
    """In the volume, which does all the reading and writing. Once."""
    configure(rdma_max_chunk_size_mb=_RDMA_CHUNK_MB)


def _rdma_wait_s(nbytes: int) -> int:
    return _RDMA_WAIT_S + nbytes // _RDMA_NBYTES_PER_S
