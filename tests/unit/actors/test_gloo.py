"""Functional collectives that are under way at once, on real process groups."""

import subprocess
import sys

import pytest

NUM_RANKS = 2
ROUNDS = 800  # with two threads a group, most runs end within them: double free, or a segmentation fault

RANK = """
import sys, torch, torch.distributed as dist
from forge.actors.trainer.gloo import use_one_thread
from torch.distributed._functional_collectives import all_gather_tensor

torch.set_num_threads(1)
use_one_thread()
rank, size, store, rounds = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
for group in (dist.group.WORLD, dist.new_group(list(range(size)))):
    for i in range(rounds):
        length = (8, 64, 200, 2000)[i % 4]
        own = [torch.full((length,), float(rank + 10 * k)) for k in range(3)]
        gathered = [all_gather_tensor(x, 0, group) for x in own]
        for k, x in enumerate(gathered):
            assert torch.equal(x.view(size, length)[:, 0], torch.arange(size) + 10.0 * k)
print("done")
dist.destroy_process_group()
"""


@pytest.mark.timeout(200)
def test_collectives_that_are_under_way_at_once_free_nothing_twice(tmp_path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(NUM_RANKS), str(tmp_path / "store"), str(ROUNDS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        printed = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert printed == ["done\n"] * NUM_RANKS
