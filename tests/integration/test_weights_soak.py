"""Hundreds of versions and random kills: whatever is read is right, and nothing piles up."""

import asyncio

import monarch.actor
import pytest

from tests.integration.weights_soak import READERS, Soak

KILLS = ["reader1", "writer", "volume", "reader2", "writer"]


@pytest.mark.slow
def test_500_versions_and_kills_leave_no_stale_read_and_flat_memory() -> None:
    monarch.actor.unhandled_fault_hook = lambda failure: None
    soak = Soak(500, KILLS)
    asyncio.run(soak.run())
    print(soak)
    assert not soak.wrong
    assert all(soak.num_read[name] > 150 for name in READERS), soak.num_read
    began, settled, ended = soak.began, soak.settled, soak.ended
    assert began is not None and settled is not None and ended is not None
    assert ended.shared_names <= began.shared_names
    assert len(ended.pids) == len(settled.pids) == 6
    assert ended.num_files <= settled.num_files + 8
    assert ended.num_arenas <= began.num_arenas + 8  # earlier tests of this process have theirs
    assert ended.num_arenas <= settled.num_arenas + 2
    assert ended.resident_mb <= settled.resident_mb + 60  # 200 versions that leak once are 130 MB
