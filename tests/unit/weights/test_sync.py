"""Holds and claims where the registry or a volume fails, with stubs for both."""

import asyncio
import logging
import pickle
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from forge.errors import WeightsMismatch, WeightsMissing
from forge.weights import Box, TensorFacts, push, sync
from forge.weights.keys import PartKey
from forge.weights.manifest import Claim, Manifest, Shards
from forge.weights.part import pack, plan_pieces
from forge.weights.process import Process
from forge.weights.registry import Reader, StoredPart
from forge.weights.registry_actor import Held
from forge.weights.transport import host_identity

KEY = PartKey(7, 0, 1, 0)


def endpoint(answer: Any) -> Any:
    """Answers so, or raises it."""

    async def call_one(*_: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(call_one=Mock(side_effect=call_one), broadcast=Mock())


def test_a_hold_that_can_not_be_renewed_spoils_no_good_result(
    monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(sync, "HOLD_S", 0.0)
    registry = SimpleNamespace(
        hold=endpoint("held"), renew=endpoint(OSError("no connection")), let_go=endpoint(None)
    )
    store: Any = SimpleNamespace(registry=registry)

    async def read() -> str:
        async with sync._hold(store, 7, Reader(Process.this(), 0), 1.0) as held:
            await asyncio.sleep(0.01)
            return str(held)

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(read()) == "held"
    assert "the hold of version 7 of the weights was not renewed: OSError('no connection')" in caplog.text
    assert registry.let_go.broadcast.call_count == 1


@pytest.mark.parametrize(
    ("box", "host", "is_proven"),
    [
        (Box((0, 0), (4, 2)), host_identity(), True),
        (Box((0, 0), (2, 2)), host_identity(), False),
        (Box((0, 0), (4, 2)), "elsewhere/1/2/3/tcp", False),
    ],
    ids=["whole", "partial", "from elsewhere"],
)
def test_only_whole_tensors_from_shared_memory_need_no_second_word_of_the_registry(
    box: Box, host: str, is_proven: bool
) -> None:
    manifest = Manifest(7, {"w": TensorFacts(torch.float32, (4, 2), 1)}, "the trainer")
    shards = Shards(7, manifest, {}, {"w": Claim(box, 1)})
    held = Held("the trainer", [StoredPart(KEY, f"{host}#0", b"")])
    assert sync._is_proven(shards, held) is is_proven


def test_ranks_that_contradict_each_other_have_damaged_a_version() -> None:
    parts = []
    for rank, width in enumerate((2, 3)):
        placed, nbytes = plan_pieces({"w": torch.zeros(4, width)})
        part = pack(placed, torch.empty(nbytes, dtype=torch.uint8))
        parts.append(StoredPart(PartKey(7, rank, 2, rank), "v", pickle.dumps(part)))
    with pytest.raises(WeightsMismatch, match="version 7 of the weights is damaged: w: ranks disagree"):
        sync._unpack(7, Held("the trainer", parts))


def test_a_push_that_finds_no_volume_is_told_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = SimpleNamespace(
        begin=endpoint(KEY), fail=endpoint(None), choose_volume=endpoint(WeightsMissing("no host is left"))
    )

    async def connect() -> Any:
        return push.Store(registry)  # type: ignore[arg-type]

    monkeypatch.setattr(push, "connect", connect)
    monkeypatch.setattr("forge.weights.store.this_host", Mock())
    with pytest.raises(WeightsMissing, match="no host is left"):
        asyncio.run(push.begin_push(7, rank=0, world_size=1))
    registry.fail.call_one.assert_called_once_with(KEY, "WeightsMissing: no host is left")
