"""What comes of a volume that is gone, says nothing, or raises; the volume is a stub."""

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge.errors import WeightsMissing
from forge.weights import volume_client
from forge.weights._torchstore import ActorError, SupervisionError
from forge.weights.arena import Arena
from forge.weights.buffers import ReferenceBuffer, travelling_by
from forge.weights.transport import host_identity
from forge.weights.volume_client import VolumeClient


def client(put: Any) -> VolumeClient:
    """Of a volume on this host whose endpoint does this."""
    actor: Any = SimpleNamespace(put=SimpleNamespace(call_one=put))
    return VolumeClient(f"{host_identity()}#0", actor)


def put(to: VolumeClient) -> None:
    arena = Arena.create(4096)
    arena.release()
    with travelling_by(ReferenceBuffer()):
        asyncio.run(to.put("key", arena.bytes()))


def test_what_is_put_is_what_the_volume_gets() -> None:
    got = []

    async def take(key: str, buffer: Any, request: Any) -> None:
        tensor = await pickle.loads(pickle.dumps(buffer)).read_into()
        got.append((key, len(tensor), request.tensor_val))

    put(client(take))
    assert got == [("key", 4096, None)]


def test_a_volume_that_says_nothing_is_missing_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_client, "_WAIT_S", 0.05)

    async def stay(*_: object) -> None:
        await asyncio.sleep(1000)

    with pytest.raises(WeightsMissing, match="the volume of the weights on .* has not answered for 0 s"):
        put(client(stay))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SupervisionError("its process ended"), "does not answer: its process ended"),
        (ActorError(WeightsMissing("the shared memory was freed"), "weights_volume0"), "^the shared memory"),
    ],
)
def test_errors_of_a_volume_are_those_of_the_weights(error: Exception, words: str) -> None:
    async def fail(*_: object) -> None:
        raise error

    with pytest.raises(WeightsMissing, match=words):
        put(client(fail))


def test_other_errors_of_a_volume_stay_what_they_are() -> None:
    async def fail(*_: object) -> None:
        raise ActorError(KeyError("key"), "weights_volume0")

    with pytest.raises(ActorError, match="KeyError"):
        put(client(fail))


def test_time_is_given_for_the_bytes_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    async def wait_for(call: Any, limit_s: float) -> Any:
        waits.append(limit_s)
        return await call

    async def take(*_: object) -> None: ...

    monkeypatch.setattr(volume_client.asyncio, "wait_for", wait_for)
    near = client(take)
    actor: Any = SimpleNamespace(put=SimpleNamespace(call_one=take))
    far = VolumeClient("elsewhere/1/2/3/tcp#0", actor)
    put(near)
    put(far)
    asyncio.run(far.put("key", torch.zeros(50_000_000, dtype=torch.uint8)))
    assert waits[0] == 60 and waits[1] == pytest.approx(60, abs=0.001) and waits[2] == pytest.approx(61)
