"""Which way bytes take, and that each way brings just those that were asked for, with both ends here."""

import asyncio
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from forge.errors import ConfigError, WeightsMissing
from forge.weights import transport
from forge.weights._torchstore import Pipe, TransportBuffer
from forge.weights.arena import Arena
from forge.weights.box import Box
from forge.weights.buffers import MessageGet, MessagePut, Place, ReferenceBuffer, travelling_by
from forge.weights.cut import Cut
from forge.weights.transport import Transport, host_identity


@contextmanager
def host(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, this process counts as one of another host."""
    with monkeypatch.context() as patched:
        patched.setenv("FORGE_WEIGHTS_HOST", name)
        host_identity.cache_clear()
        yield
    host_identity.cache_clear()


@pytest.mark.parametrize(
    ("asked", "here_has_hardware", "there_has_hardware", "chosen"),
    [
        (None, True, True, Transport.RDMA),
        (None, True, False, Transport.MESSAGES),
        (None, False, True, Transport.MESSAGES),
        ("1", False, False, Transport.RDMA),
        ("0", True, True, Transport.MESSAGES),
    ],
)
def test_shared_memory_within_a_host_and_what_was_asked_for_between_hosts(
    asked: str | None,
    here_has_hardware: bool,
    there_has_hardware: bool,
    chosen: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHSTORE_USE_RDMA", raising=False)
    if asked is not None:
        monkeypatch.setenv("TORCHSTORE_USE_RDMA", asked)
    monkeypatch.setattr(transport, "is_ibverbs_available", lambda: there_has_hardware)
    with host("there", monkeypatch):
        there = host_identity()
        assert Transport.between(there) is Transport.SHARED_MEMORY
    monkeypatch.setattr(transport, "is_ibverbs_available", lambda: here_has_hardware)
    with host("here", monkeypatch):
        assert Transport.between(there) is chosen


def test_another_word_for_rdma_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSTORE_USE_RDMA", "yes")
    with pytest.raises(ConfigError, match="TORCHSTORE_USE_RDMA must be 0 or 1, or not set, got 'yes'"):
        Transport.between(host_identity())


def sent(buffer: TransportBuffer) -> TransportBuffer:
    """As the other side gets it."""
    return pickle.loads(pickle.dumps(buffer))


def stored_arena(nbytes: int) -> Tensor:
    arena = Arena.create(nbytes)
    arena.bytes().copy_(torch.arange(nbytes, dtype=torch.int64))
    arena.release()
    return arena.bytes()


def get(buffer: ReferenceBuffer | MessageGet, stored: Tensor) -> tuple[Tensor, int]:
    """What arrives of what is stored, and the bytes of the reply that brings it."""

    async def both_ends() -> tuple[Tensor, int]:
        buffer.allocate(None)
        asked = sent(buffer)
        await asked.write_from(stored)
        buffer.update(sent(asked))
        return await buffer.read_into(None), len(pickle.dumps(asked))

    return asyncio.run(both_ends())


def test_an_arena_arrives_without_its_bytes() -> None:
    stored = stored_arena(1 << 20)
    arrived, reply_nbytes = get(ReferenceBuffer(), stored[100:200])
    assert torch.equal(arrived, stored) and reply_nbytes < 1000


def test_cuts_arrive_one_behind_the_other_and_nothing_else_does() -> None:
    stored = stored_arena(1 << 20)
    cuts = [
        Cut(3, 1, (10, 7), Box((2, 1), (3, 5))),
        Cut(1000, 4, (6,), Box((4,), (2,))),
        Cut(2001, 2, (), Box((), ())),
    ]
    arrived, reply_nbytes = get(MessageGet(cuts), stored[:64])  # any key of an arena stands for all of it
    wanted = [3 + 7 * row + column for row in (2, 3, 4) for column in (1, 2, 3, 4, 5)]
    wanted += [*range(1016, 1024), 2001, 2002]
    assert arrived.tolist() == [value % 256 for value in wanted] and reply_nbytes < 1000


def test_messages_fill_one_arena_that_is_there_until_the_last_of_its_keys_is_deleted() -> None:
    data = torch.arange(100, dtype=torch.uint8)

    async def put(start: int, stop: int) -> Tensor:
        buffer = MessagePut(Place("a transfer", start, len(data)))
        await buffer.write_from(data[start:stop])
        return await sent(buffer).read_into(None)

    keys = [asyncio.run(put(60, 100)), asyncio.run(put(0, 60))]
    assert torch.equal(keys[1], data[:60])
    arrived, _ = get(ReferenceBuffer(), keys[0])
    assert torch.equal(arrived, data)
    arena = Arena.of(keys[0])
    assert arena is not None
    reference = arena.reference()
    del arena, arrived
    keys.pop()
    Arena.attach(reference)
    keys.pop()
    with pytest.raises(WeightsMissing, match="freed"):
        Arena.attach(reference)


def test_a_buffer_serves_one_put_or_get_and_objects_need_none() -> None:
    pipe = Pipe(None)
    buffer = MessageGet([])
    with travelling_by(buffer):
        assert pipe.create_transport_buffer() is buffer
    first, second = pipe.create_transport_buffer(), pipe.create_transport_buffer()
    assert first is not second and first is not buffer
