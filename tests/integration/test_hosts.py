"""Several hosts, on real processes: where replicas go, and that a host can be lost."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter as Tally
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from forge.controller import Runtime, Service
from forge.controller.launcher import LocalHosts
from forge.controller.provisioner import is_running
from forge.errors import ConfigError, NotEnoughGPUs
from tests.integration.machines import Counter, Fragile
from tests.integration.test_services import children, healed, until

KEYS = ("CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def on_hosts(launcher: LocalHosts, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs it with these hosts, and sees to it that no process is left."""

    async def main() -> None:
        async with Runtime(launcher=launcher):
            await scenario()

    before = children()
    asyncio.run(main())
    assert not hosts_of_root() and children() <= before


def hosts_of_root() -> set[int]:
    """Pids of this process's children that lead a session: emulated hosts."""
    return {pid for pid in children() if os.getsid(pid) == pid}


async def hosts_by_pid(service: Service) -> dict[int, str]:
    return {pid: replica.hosts[0] for replica in await service.replicas() for pid in replica.pids}


def kill_host(pid_on_it: int) -> list[int]:
    """SIGKILL for a host and all its processes, in no good order; their pids."""
    host = os.getsid(pid_on_it)
    assert host != os.getsid(0)
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    members = [pid for pid in pids if is_running(pid) and os.getsid(pid) == host]
    for pid in sorted(members, reverse=True):
        os.kill(pid, signal.SIGKILL)
    return members


def test_a_lost_host_reaches_no_caller_and_is_replaced() -> None:
    async def scenario() -> None:
        service = await Fragile.options(num_replicas=4).as_service()
        before = await hosts_by_pid(service)
        assert Tally(before.values()) == {"host0": 2, "host1": 2}
        hosts = hosts_of_root()
        assert len(hosts) == 2
        calls = [asyncio.ensure_future(service.pid.route(0.02 * i)) for i in range(100)]
        await asyncio.sleep(0.3)
        kill_host(next(pid for pid, host in before.items() if host == "host1"))
        answers = await asyncio.wait_for(asyncio.gather(*calls), 60)
        await healed(service)
        after = await hosts_by_pid(service)
        assert len(after) == 4 and set(after.values()) <= {"host0", "host1'"}
        untouched = {pid for pid, host in before.items() if host == "host0"}
        assert untouched < set(after) and untouched < set(answers)
        await until(lambda: len(hosts_of_root()) == 2, 20)
        assert len(hosts_of_root() & hosts) == 1

    on_hosts(LocalHosts(2), scenario)


def test_gpus_of_a_lost_host_are_found_on_its_replacement() -> None:
    async def scenario() -> None:
        service = await Counter.options(procs=2, with_gpus=True, num_replicas=2).as_service()
        places = [(r.hosts, r.gpus) for r in await service.replicas()]
        assert sorted(places) == [(("host0",), ("0", "1")), (("host1",), ("0", "1"))]
        kill_host((await service.replicas())[1].pids[0])
        replica = await until_replica(service, 1, lambda r: r.state.value == "healthy" and r.restarts)
        assert (replica.hosts, replica.gpus) == (("host1'",), ("0", "1"))
        kill_host(replica.pids[0])  # there is no third
        replica = await until_replica(service, 1, lambda r: r.state.value == "failed")
        assert "counter wants 2 GPUs, 0 of 2 are free" in (replica.reason or "")
        assert await service.add.route() == 1

    on_hosts(LocalHosts(2, gpus_per_host=2), scenario)


def test_each_process_sees_its_own_gpu_and_rank_also_over_two_hosts() -> None:
    async def scenario() -> None:
        narrow = await Counter.options(with_gpus=True, mesh_name="narrow").as_service()
        wide = await Counter.options(procs=2, hosts=2, with_gpus=True).as_actor()
        plain = await Counter.options(procs=2, hosts=2, mesh_name="plain").as_actor()
        cpu = await Counter.options(mesh_name="cpu").as_service()
        seen = dict(zip(KEYS, await asyncio.gather(*(read(wide, key) for key in KEYS)), strict=True))
        assert seen["CUDA_VISIBLE_DEVICES"] == ["1", "2", "0", "1"]
        assert seen["RANK"] == ["0", "1", "2", "3"] and seen["LOCAL_RANK"] == ["0"] * 4
        assert await read(plain, "LOCAL_RANK") == ["0", "1", "0", "1"]
        assert set(seen["WORLD_SIZE"]) == {"4"} and set(seen["LOCAL_WORLD_SIZE"]) == {"2"}
        assert set(seen["MASTER_ADDR"]) == {"127.0.0.1"}
        places = [place for _, place in (await wide.where.call()).items()]
        assert [(rank, size) for rank, size, _ in places] == [(i, 4) for i in range(4)]
        assert Tally(os.getsid(pid) for *_, pid in places) == dict.fromkeys(hosts_of_root(), 2)
        assert await wide.add.route(1) == 1  # at rank 0
        assert await narrow.environment.route("CUDA_VISIBLE_DEVICES") == "0"
        assert await cpu.environment.route("CUDA_VISIBLE_DEVICES") == ""
        with pytest.raises(
            NotEnoughGPUs, match=r"3 GPUs on one host, the hosts have 3 \+ 3, of which 0 \+ 1"
        ):
            await Counter.options(procs=3, with_gpus=True).as_actor()
        with pytest.raises(ConfigError, match="wants 3 hosts for one replica, and there are 2"):
            await Counter.options(hosts=3).as_actor()

    on_hosts(LocalHosts(2, gpus_per_host=3), scenario)


def test_hosts_end_when_the_root_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, json, os\n"
        "from forge.controller import Runtime\n"
        "from forge.controller.launcher import LocalHosts\n"
        "from tests.integration.machines import Fragile\n"
        "async def main():\n"
        "    async with Runtime(launcher=LocalHosts(2)):\n"
        "        service = await Fragile.options(num_replicas=2).as_service()\n"
        "        pids = await service.pid.fanout()\n"
        "        print(json.dumps([*pids, *map(os.getsid, pids)]), flush=True)\n"
        "        await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = ""
    while not line.startswith("["):
        line = process.stdout.readline()
        assert line, "the script has ended"
    pids = set(json.loads(line))
    assert len(pids) == 4 and all(is_running(pid) for pid in pids)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while left := {pid for pid in pids if is_running(pid)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_replica_over_two_hosts_heals_when_one_of_them_is_lost() -> None:
    async def scenario() -> None:
        service = await Fragile.options(hosts=2).as_service()
        [before] = await service.replicas()
        assert before.hosts == ("host0", "host1") and len(before.pids) == 2
        call = asyncio.ensure_future(service.pid.route(2))
        await asyncio.sleep(0.5)
        kill_host(before.pids[1])
        answer = await asyncio.wait_for(call, 60)
        replica = await until_replica(service, 0, lambda r: r.state.value == "healthy" and r.restarts)
        assert set(replica.hosts) == {"host0", "host1'"} and len(replica.pids) == 2
        assert not any(is_running(pid) for pid in before.pids)
        assert answer in (before.pids[0], replica.pids[0])  # rank 0 was on the other host
        assert await service.pid.route() == replica.pids[0]

    on_hosts(LocalHosts(2), scenario)


def test_a_host_on_which_nothing_starts_any_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge.controller.provisioner._ARRIVAL_S", 5.0)

    async def scenario() -> None:
        service = await Fragile.options(num_replicas=2).as_service()
        victim = next(pid for pid, host in (await hosts_by_pid(service)).items() if host == "host1")
        frozen = os.getsid(victim)
        os.kill(frozen, signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        answers = await asyncio.wait_for(asyncio.gather(*(service.pid.route() for _ in range(8))), 60)
        assert victim not in answers
        replica = await until_replica(service, 1, lambda r: r.state.value == "healthy" and r.restarts)
        assert replica.hosts[0] in ("host0", "host1'") and not is_running(frozen)

    on_hosts(LocalHosts(2), scenario)


async def read(actor: Any, key: str) -> list[str]:
    return [value for _, value in (await actor.environment.call(key)).items()]


async def until_replica(service: Service, index: int, condition: Callable[[Any], Any]) -> Any:
    async with asyncio.timeout(60):
        while not condition(replica := (await service.replicas())[index]):
            await asyncio.sleep(0.1)
    return replica
