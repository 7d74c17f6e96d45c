"""Soak of the weights: many versions, one writer, readers, random kills. Run it for longer with

python -m tests.integration.weights_soak --versions 20000 --kills 200
"""

import argparse
import asyncio
import os
import random
import time
from dataclasses import dataclass, field

import monarch.actor
import psutil
import torch
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, endpoint
from torch import Tensor

from forge.errors import WeightsMismatch, WeightsMissing
from forge.weights import close_store, fetch, open_store, publish, retire, unfinished, versions
from tests.integration.test_weights import arena_files, descriptors, shared_memory_with_a_name
from tests.integration.weights_peers import Peers, differences, is_alive

KEPT = 2  # newest versions
AT_ONCE = 10  # versions of one call
PAUSE_S = 0.02  # between two versions
READERS = ["reader0", "reader1", "reader2"]
MB = 1 << 20


def make_model(version: int) -> dict[str, Tensor]:
    """Two thirds of a megabyte that only this version has."""
    generator = torch.Generator().manual_seed(version)
    return {
        "version": torch.tensor(version),
        "block": torch.randn(256, 512, generator=generator),
        "half": torch.randn(7, 5000, generator=generator).bfloat16(),
    }


class SoakPeer(Actor):
    """Writer or reader."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def push(self, first: int, last: int) -> None:
        for version in range(first, last + 1):
            await publish(version, make_model(version), rank=0, world_size=1)
            await retire(version - KEPT)
            await asyncio.sleep(PAUSE_S)

    @endpoint
    async def follow(self, first: int, last: int) -> tuple[int, list[str]]:
        """Reads each version that it is in time for. Returns how many, and what was wrong with them."""
        num_read, wrong, version = 0, [], first
        while version <= last:
            try:
                found = await fetch(version)
            except WeightsMissing:  # retired or lost: the newest is next
                newest = max(await versions(), default=0)
                if newest <= version:
                    await asyncio.sleep(PAUSE_S)
                version = max(newest, version)
                continue
            except WeightsMismatch as error:
                wrong.append(str(error))
            else:
                wrong += [f"{name} of version {version}" for name in differences(found, make_model(version))]
            num_read += 1
            version += 1
        return num_read, wrong


@dataclass(frozen=True, slots=True)
class Footprint:
    """What all processes of the job hold together."""

    pids: frozenset[int]
    num_files: int  # without sockets, of which Monarch opens some now and then
    num_arenas: int
    resident_mb: float
    shared_names: frozenset[str]  # of files in /dev/shm

    @classmethod
    def now(cls, others: frozenset[int] = frozenset()) -> "Footprint":
        """others: processes that are none of the job's: other tests may have left some behind."""
        children = [child for child in psutil.Process().children(recursive=True) if is_alive(child)]
        family = [psutil.Process(), *(child for child in children if child.pid not in others)]
        pids = [process.pid for process in family]
        files = [t for pid in pids for t in descriptors(pid).values() if not t.startswith("socket:")]
        arenas = {inode for pid in pids for inode in arena_files(pid)}
        names = frozenset(name for pid in pids for name in shared_memory_with_a_name(pid))
        private = sum(process.memory_full_info().uss for process in family)
        return cls(frozenset(pids), len(files), len(arenas), private / MB, names)


@dataclass
class Soak:
    """One run. Kills come in its first half; what is held two fifths from the end must suffice to the end."""

    num_versions: int
    kills: list[str]  # names of peers, or "volume", in this order
    seed: int = 0
    num_read: dict[str, int] = field(default_factory=lambda: dict.fromkeys(READERS, 0))
    wrong: list[str] = field(default_factory=list)
    began: Footprint | None = None
    settled: Footprint | None = None
    ended: Footprint | None = None

    async def run(self) -> None:
        self._peers = Peers(SoakPeer)
        self._dice = random.Random(self.seed)
        self._starting: set[str] = set()
        self._killed: set[int] = set()
        self.began = Footprint.now()
        self._others = self.began.pids - {os.getpid()}
        await asyncio.gather(open_store(), self._peers.start("writer", *READERS))
        try:
            async with asyncio.TaskGroup() as group:
                for name in READERS:
                    group.create_task(self._follow(name))
                await self._push()
            self.ended = Footprint.now(self._others)
        finally:
            self._peers.stop()
            await close_store()

    async def _push(self) -> None:
        calls = range(2, 1 + self.num_versions // 2 // AT_ONCE)  # in which somebody is killed
        doomed = dict(zip(sorted(self._dice.sample(calls, len(self.kills))), self.kills, strict=True))
        num_calls, first = 0, 1
        while first <= self.num_versions:
            last = min(first + AT_ONCE - 1, self.num_versions)
            pushing = asyncio.ensure_future(self._peers.writer.push.call_one(first, last))
            if victim := doomed.get(num_calls):
                await asyncio.sleep(self._dice.uniform(0, AT_ONCE * PAUSE_S))
                self._kill(victim)
            try:
                await pushing
                first = last + 1
            except (ActorError, SupervisionError) as error:
                assert victim in ("writer", "volume"), error
                if victim == "writer":
                    await self._peers.start("writer")
                first = await self._next_version(first)
            num_calls += 1
            if self.settled is None and 3 * self.num_versions <= 5 * last:
                self.settled = Footprint.now(self._others)
            while 2 * self.num_versions <= 4 * last and self._starting:  # all are there for the second half
                await asyncio.sleep(0.1)

    def _kill(self, victim: str) -> None:
        if victim != "volume":
            self._killed.add(self._peers.pids[victim])
            return self._peers.kill(victim)
        ours = {os.getpid(), *self._peers.pids.values()}
        for process in psutil.Process().children(recursive=True):
            if process.pid not in ours | self._others and arena_files(process.pid):
                process.kill()

    async def _next_version(self, first: int) -> int:
        """Clears away what a push that was cut short has left."""
        complete = await versions()
        for version in [*await unfinished(), *complete[:-KEPT]]:
            await retire(version)
        return max([first, *(version + 1 for version in complete)])

    async def _follow(self, name: str) -> None:
        version = 1
        while version <= self.num_versions:
            last = min(version + AT_ONCE - 1, self.num_versions)
            try:
                num_read, wrong = await self._peers[name].follow.call_one(version, last)
            except (ActorError, SupervisionError):
                if self._peers.pids[name] not in self._killed:
                    raise
                self._starting.add(name)
                await self._peers.start(name)
                self._starting.remove(name)
                version = max([version, *await versions()])
                continue
            self.num_read[name] += num_read
            self.wrong += wrong
            version = last + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=500)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    monarch.actor.unhandled_fault_hook = lambda failure: None
    kills = random.Random(arguments.seed).choices(["writer", "volume", *READERS], k=arguments.kills)
    soak = Soak(arguments.versions, kills, arguments.seed)
    started = time.perf_counter()
    asyncio.run(soak.run())
    print(f"{arguments.versions} versions, killed {kills}, {time.perf_counter() - started:.1f} s")
    print(f"read {soak.num_read}, wrong {soak.wrong}\n{soak.settled}\n{soak.ended}")


if __name__ == "__main__":
    main()
