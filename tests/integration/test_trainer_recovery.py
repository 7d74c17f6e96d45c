"""A trainer whose processes are killed ends up, to the bit, where one ends up that was left alone."""

import multiprocessing
import random
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forge.actors.trainer.learner import Facts
from forge.controller.journal import Journal
from tests.integration.recovery_worker import CALLS, Life, live

TIMEOUT_S = 120
ONLY_RANK_0 = [  # where a rank dies: audit event, part of a path, how often in that life
    ("open", "journal", 3),  # as it cuts the journal
    ("os.remove", "snapshot", 1),  # as it drops older snapshots
    ("os.rename", "exported", 2),
]
ANY_RANK = [
    ("os.rename", "snapshot", 1),  # written, but not yet there
    ("open", ".partial", 1),  # about to be written
]
BEFORE_IT_IS_STORED = ("os.rename", "stored", 1)  # a version whose push has returned
BEFORE_ITS_ANSWER = ("os.listdir", "state", 6)  # rank 0 in its first life: updated, snapshot not begun
PLACES = {
    1: [BEFORE_IT_IS_STORED, *ONLY_RANK_0[:1], *ANY_RANK, *ONLY_RANK_0[1:]],
    2: [BEFORE_IT_IS_STORED, *ANY_RANK],
}
processes_of = multiprocessing.get_context("forkserver")
processes_of.set_forkserver_preload(["tests.integration.recovery_worker"])


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """The server that processes are forked from has loaded torchtitan."""
    process = processes_of.Process(target=time.time)
    process.start()
    process.join()


@dataclass
class Run:
    """A caller who asks for CALLS, and starts the trainer anew whenever one of its ranks died."""

    model: Path
    folder: Path
    world_size: int

    def life(self, dies_at: tuple[str, str, int] | None = None, at_random: bool = False) -> bool:
        """One life, in which a random rank dies at a place or some time; whether it was the last."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        victim = random.randrange(self.world_size)
        if dies_at in (*ONLY_RANK_0, BEFORE_ITS_ANSWER):
            victim = 0
        first_call = min(len({n for n, _ in self.answers(rank)}) for rank in range(self.world_size))
        ranks: list[BaseProcess] = []
        for rank in range(self.world_size):
            dies = dies_at if rank == victim else None
            life = Life(self.model, self.folder, rank, self.world_size, port, first_call, dies)
            ranks.append(processes_of.Process(target=live, args=[life]))
        try:
            for process in ranks:
                process.start()
            if at_random:
                path = self.folder / f"answers{victim}"
                size = path.stat().st_size
                while path.stat().st_size == size:  # until it has answered a call
                    assert not wait([p.sentinel for p in ranks], 0.01), "a rank ended by itself"
                time.sleep(random.uniform(0, 0.05))
                ranks[victim].kill()
            return self._died_or_finished(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.join()

    def _died_or_finished(self, ranks: list[BaseProcess]) -> bool:
        running = list(ranks)
        while running:
            assert wait([p.sentinel for p in running], TIMEOUT_S), "a rank hangs"
            if any(p.exitcode == -9 for p in ranks):
                return False
            assert all(p.exitcode in (None, 0) for p in ranks), [p.exitcode for p in ranks]
            running = [p for p in running if p.exitcode is None]
        return True

    def answers(self, rank: int) -> list[tuple[int, Any]]:
        """(number of the call, answer); a call that was repeated may stand there twice."""
        return Journal(self.folder / f"answers{rank}").records

    def final(self, rank: int) -> tuple[Facts, list[Tensor]]:
        return torch.load(self.folder / f"final{rank}", weights_only=False)


def assert_same(run: Run, undisturbed: Run) -> None:
    for rank in range(run.world_size):
        answered, wanted = run.answers(rank), dict(undisturbed.answers(rank))
        assert {number for number, _ in answered} == set(range(len(CALLS)))
        for number, answer in answered:
            assert answer == wanted[number], f"rank {rank}: call {number}, {CALLS[number][0]}"
        (facts, tensors), (wanted_facts, wanted_tensors) = run.final(rank), undisturbed.final(rank)
        assert (facts.num_steps, facts.loss) == (wanted_facts.num_steps, wanted_facts.loss)
        assert torch.equal(facts.random[0], wanted_facts.random[0])
        assert len(tensors) == len(wanted_tensors)
        assert all(map(torch.equal, tensors, wanted_tensors))
    stored, wanted = (sorted((r.folder / "stored").glob("*of*")) for r in (run, undisturbed))
    assert [path.name for path in stored] == [path.name for path in wanted] and len(wanted) > run.world_size
    for path, other in zip(stored, wanted, strict=True):
        weights, wanted_weights = torch.load(path), torch.load(other)
        assert all(torch.equal(weights[name], wanted_weights[name]) for name in wanted_weights), path.name
    exported, wanted = (load_file(r.folder / "exported/model.safetensors") for r in (run, undisturbed))
    assert exported.keys() == wanted.keys()
    assert all(torch.equal(exported[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_anywhere_it_ends_up_where_one_ends_up_that_was_left_alone(
    tiny_llama: Path, tmp_path: Path, world_size: int
) -> None:
    undisturbed = Run(tiny_llama, tmp_path / "undisturbed", world_size)
    undisturbed.folder.mkdir()
    assert undisturbed.life()
    [step_count] = {undisturbed.final(rank)[0].num_steps for rank in range(world_size)}
    assert step_count == sum(method == "train_step" for method, _ in CALLS) + 1

    run = Run(tiny_llama, tmp_path / "killed", world_size)
    run.folder.mkdir()
    assert not run.life(dies_at=BEFORE_ITS_ANSWER)
    assert dict(run.answers(0)).keys() == {0, 1, 2}  # 3 has been done
    assert not run.life(at_random=True)
    for place in PLACES[world_size]:
        assert not run.life(dies_at=place), f"nobody died at {place}"
    assert run.life()
    assert_same(run, undisturbed)
