"""Where replicas go: the arithmetic of the ledger, and what happens to it when a host is gone."""

import asyncio
from pathlib import Path

import pytest

from forge.controller.ledger import Demand, Host, Ledger
from forge.controller.machine import visible_gpus
from forge.controller.placement_table import placement_table
from forge.controller.provisioner import Provisioner
from forge.errors import ActorFailure, ConfigError, NotEnoughGPUs

TWO, FOUR = ["0", "1"], ["0", "1", "2", "3"]


def hosts_of(*num_gpus: int, num_cores: int = 8) -> list[Host]:
    return [Host(f"host{i}", [str(g) for g in range(n)], num_cores) for i, n in enumerate(num_gpus)]


def gpu(name: str, procs: int, num_replicas: int = 1, *, num_hosts: int = 1) -> Demand:
    return Demand(name, procs, num_hosts, True, num_replicas, True)


def sharing(name: str, procs: int, num_replicas: int = 1, *, num_hosts: int = 1) -> Demand:
    return Demand(name, procs, num_hosts, True, num_replicas, True, shares_gpus_with="trainer")


def cpu(name: str, num_replicas: int = 1, procs: int = 1) -> Demand:
    return Demand(name, procs, 1, False, num_replicas, False)


class FakeHosts:
    """Hosts that are lost on request, and replaced so often."""

    def __init__(self, hosts: list[Host], num_spares: int = 0) -> None:
        self.hosts = hosts
        self.gone: set[str] = set()
        self.num_spares = num_spares
        self.may_replace = asyncio.Event()

    def plan(self) -> list[Host]:
        return self.hosts

    async def start(self, hosts: list[Host], folder: Path) -> None:
        pass

    def is_gone(self, host: Host) -> bool:
        return host.name in self.gone

    async def replace(self, host: Host) -> Host | None:
        await self.may_replace.wait()
        if not self.num_spares:
            raise ActorFailure("the cluster has no more machines")
        self.num_spares -= 1
        return Host(f"{host.name}'", host.gpus, host.num_cores)

    async def stop(self) -> None:
        pass


def test_replicas_without_gpus_go_to_the_least_busy_host_by_its_cores() -> None:
    ledger = Ledger([Host("small", [], 2), Host("large", [], 6)])
    places = ledger.reserve(cpu("reward", 8), 8)
    assert [place.hosts[0].name for place in places].count("large") == 6
    assert [host.num_procs for host in ledger.hosts] == [2, 6]


def test_gpus_of_one_replica_lie_on_one_host_and_small_ones_leave_room_for_large_ones() -> None:
    ledger = Ledger(hosts_of(4, 4))
    plan = ledger.plan([gpu("generator", 1, 2), gpu("ref_model", 1), gpu("trainer", 4), cpu("reward")])
    assert [place.gpus for place in plan["trainer"]] == [["0", "1", "2", "3"]]
    [trainer] = plan["trainer"]
    others = [place.hosts[0] for name in ("generator", "ref_model") for place in plan[name]]
    assert trainer.hosts[0] not in others and len(set(others)) == 1
    assert sorted(g for name in ("generator", "ref_model") for p in plan[name] for g in p.gpus) == list("012")


def test_a_replica_over_two_hosts_takes_its_gpus_on_each() -> None:
    [place] = Ledger(hosts_of(4, 1, 2)).reserve(gpu("trainer", 2, num_hosts=2), 1)
    assert {host.name for host in place.hosts} == {"host0", "host2"} and place.gpus == ["0", "1", "0", "1"]
    with pytest.raises(ConfigError, match="trainer wants 2 hosts for one replica, and there are 1"):
        Ledger(hosts_of(8)).reserve(gpu("trainer", 2, num_hosts=2), 1)


@pytest.mark.parametrize(
    ("num_gpus", "demands", "words"),
    [
        (
            (8,),
            [gpu("generator", 2, 3), gpu("trainer", 4)],
            r"generator 6 \+ trainer 4 = 10 GPUs.*8 of 8 are",
        ),
        ((4, 4), [gpu("trainer", 8)], r"trainer wants 8 GPUs on one host, the hosts have 4 \+ 4.*lower serv"),
        ((4, 2), [gpu("generator", 3, 2)], r"generator wants 3 GPUs .*replica 2 of 2, .*of which 1 \+ 2 are"),
        ((4, 2), [gpu("trainer", 3, num_hosts=2)], r"3 GPUs on each of 2 hosts, the hosts have 4 \+ 2"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers_and_takes_nothing(
    num_gpus: tuple[int, ...], demands: list[Demand], words: str
) -> None:
    ledger = Ledger(hosts_of(*num_gpus))
    with pytest.raises(NotEnoughGPUs, match=words):
        ledger.plan(demands)
    assert [host.free for host in ledger.hosts] == [host.gpus for host in ledger.hosts]
    assert not any(host.num_procs for host in ledger.hosts)


def test_places_are_kept_from_the_check_until_the_start_and_given_back_once() -> None:
    ledger = Ledger(hosts_of(4, 4))
    plan = ledger.plan([gpu("ref_model", 1), gpu("trainer", 4)])
    with pytest.raises(NotEnoughGPUs, match="stranger wants 4"):
        ledger.reserve(gpu("stranger", 4), 1)
    assert ledger.reserve(gpu("ref_model", 1), 1) == plan["ref_model"]
    [trainer] = ledger.reserve(gpu("trainer", 4), 1)
    assert [trainer] == plan["trainer"]
    ledger.give_back(trainer)
    ledger.give_back(trainer)
    assert sorted(len(host.free) for host in ledger.hosts) == [3, 4]
    ledger.plan([gpu("trainer", 4)])
    ledger.plan([gpu("trainer", 4)])  # the earlier plan is dropped
    assert sum(len(host.free) for host in ledger.hosts) == 3


@pytest.mark.parametrize(
    ("num_gpus", "demands", "generators", "reference"),
    [
        ((1,), [sharing("generator", 1), sharing("ref_model", 1), gpu("trainer", 1)], [["0"]], ["0"]),
        ((2,), [gpu("trainer", 2), sharing("generator", 2), sharing("ref_model", 2)], [TWO], TWO),
        ((2,), [gpu("trainer", 2), sharing("generator", 1, 2)], [["0"], ["1"]], None),
        ((8,), [sharing("generator", 2, 4), sharing("ref_model", 4), gpu("trainer", 8)],
         [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]], ["0", "1", "2", "3"]),
        ((4, 4), [gpu("trainer", 4, num_hosts=2), sharing("generator", 4, 2)], [FOUR, FOUR], None),
    ],
)  # fmt: skip
def test_services_that_share_gpus_are_laid_over_those_of_another(
    num_gpus: tuple[int, ...], demands: list[Demand], generators: list[list[str]], reference: list[str] | None
) -> None:
    ledger = Ledger(hosts_of(*num_gpus))
    plan = ledger.plan(demands)
    assert [place.gpus for place in plan["generator"]] == generators
    assert len({(id(p.hosts[0]), gpu) for p in plan["generator"] for gpu in p.gpus}) == sum(
        map(len, generators)
    )
    if reference is not None:
        assert [place.gpus for place in plan["ref_model"]] == [reference]
    assert not any(host.free for host in ledger.hosts)
    places = [place for each in demands for place in ledger.reserve(each, each.num_replicas)]
    for place in places:
        ledger.give_back(place)
    assert [sorted(host.free) for host in ledger.hosts] == [host.gpus for host in ledger.hosts]
    assert not any(host.num_procs for host in ledger.hosts)


@pytest.mark.parametrize(
    ("num_gpus", "demands", "words"),
    [
        (
            2,
            [gpu("trainer", 1), sharing("generator", 2)],
            r"GPUs of trainer, which has 1, and wants 1 rep.* x 2 ",
        ),
        (
            4,
            [gpu("trainer", 4), sharing("generator", 2, 3)],
            "has 4, and wants 3 replicas x 2 GPUs .* room for 2",
        ),
        (1, [cpu("trainer"), sharing("generator", 1)], "which has 0, .* raise services.trainer.procs"),
        (1, [gpu("trainer", 2), sharing("generator", 2)], "trainer wants 2 GPUs, 1 of 1 are free"),
    ],
)
def test_too_few_even_when_shared_is_told_with_the_numbers(
    num_gpus: int, demands: list[Demand], words: str
) -> None:
    ledger = Ledger(hosts_of(num_gpus))
    with pytest.raises(ConfigError, match=words):
        ledger.plan(demands)
    assert ledger.hosts[0].free == ledger.hosts[0].gpus and ledger.hosts[0].num_procs == 0


def test_a_replica_that_shares_gpus_stays_there_and_leaves_them_to_their_owner(tmp_path: Path) -> None:
    async def scenario() -> None:
        provisioner = Provisioner(FakeHosts(hosts_of(3)))
        await provisioner.open(tmp_path)
        demand = sharing("generator", 1, 2)
        provisioner.check([gpu("trainer", 2), demand])
        [trainer] = provisioner.reserve(gpu("trainer", 2), 1)
        first, second = provisioner.reserve(demand, 2)
        assert await provisioner.move(demand, first, is_suspect=True) is first
        provisioner.give_back(second)
        [again] = provisioner.reserve(demand, 1)
        assert again.gpus == second.gpus == ["1"] and trainer.gpus == ["0", "1"]
        assert provisioner.reserve(gpu("other", 1), 1)[0].gpus == ["2"]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_lent", [True, False])  # a host to take the place of the lost one
def test_a_replica_that_shares_gpus_waits_for_where_their_owner_goes(tmp_path: Path, is_lent: bool) -> None:
    async def scenario() -> None:
        launcher = FakeHosts(hosts_of(2), num_spares=int(is_lent))
        provisioner = Provisioner(launcher)
        await provisioner.open(tmp_path)
        owner, demand = gpu("trainer", 2), sharing("generator", 1, 2)
        provisioner.check([owner, demand])
        [trainer] = provisioner.reserve(owner, 1)
        first, second = provisioner.reserve(demand, 2)
        launcher.gone.add("host0")
        launcher.may_replace.set()
        moving = asyncio.ensure_future(provisioner.move(demand, first, is_suspect=False))
        await asyncio.sleep(0.05)  # the new host is there, the owner has not looked yet
        assert not moving.done()
        if is_lent:
            there = await provisioner.move(owner, trainer, is_suspect=False)
            places = [await moving, await provisioner.move(demand, second, is_suspect=False)]
            assert there.hosts[0].name == places[0].hosts[0].name == "host0'"
            assert sorted(gpu for place in places for gpu in place.gpus) == ["0", "1"]
        else:
            provisioner.give_back(trainer)  # its owner has given up
            with pytest.raises(ConfigError, match="shares the GPUs of trainer|generator wants a host"):
                await asyncio.wait_for(moving, 5)
        await provisioner.close()

    asyncio.run(scenario())


def test_gpus_on_which_others_run_are_not_left_on_suspicion(tmp_path: Path) -> None:
    async def scenario() -> None:
        provisioner = Provisioner(FakeHosts(hosts_of(2)))
        await provisioner.open(tmp_path)
        owner, demand = gpu("trainer", 1), sharing("generator", 1)
        provisioner.check([owner, demand])
        [trainer], [generator] = provisioner.reserve(owner, 1), provisioner.reserve(demand, 1)
        assert await provisioner.move(owner, trainer, is_suspect=True) is trainer
        provisioner.give_back(generator)
        assert (await provisioner.move(owner, trainer, is_suspect=True)).gpus == ["1"]

    asyncio.run(scenario())


def test_the_table_of_a_plan_shows_whose_gpus_are_shared() -> None:
    demands = [sharing("generator", 1, 2), gpu("trainer", 2), cpu("reward")]
    lines = placement_table(FakeHosts(hosts_of(2)), demands).splitlines()
    assert lines[2].split()[:6] == ["generator", "1", "host0", "1", "of", "trainer"]
    assert lines[-1] == "2 GPUs, 5 processes; this machine has 2 GPUs, 8 cores"


def test_gpus_that_were_used_are_taken_last() -> None:
    ledger = Ledger(hosts_of(3))
    [first] = ledger.reserve(gpu("a", 1), 1)
    ledger.give_back(first)
    assert [ledger.reserve(gpu("a", 1), 1)[0].gpus for _ in range(3)] == [["1"], ["2"], ["0"]]


def test_threads_are_a_share_of_the_cores_for_those_who_use_them() -> None:
    [place] = Ledger(hosts_of(4, num_cores=10)).reserve(gpu("trainer", 4), 1)
    assert place.num_threads(compute_bound=True) == 2 and place.num_threads(compute_bound=False) == 1
    [place] = Ledger(hosts_of(4, num_cores=2)).reserve(gpu("trainer", 4), 1)
    assert place.num_threads(compute_bound=True) == 1


def test_a_replica_whose_host_is_gone_moves_and_one_that_is_suspect_takes_spare_gpus(tmp_path: Path) -> None:
    async def scenario() -> None:
        launcher = FakeHosts(hosts_of(2, 3))
        provisioner = Provisioner(launcher)
        await provisioner.open(tmp_path)
        demand = gpu("generator", 2)
        [place] = provisioner.reserve(demand, 1)
        assert place.hosts[0].name == "host0"
        assert await provisioner.move(demand, place, is_suspect=False) is place
        spare = await provisioner.move(demand, place, is_suspect=True)
        assert spare.hosts[0].name == "host1" and not place.is_held
        launcher.gone.add("host1")
        launcher.may_replace.set()
        back = await provisioner.move(demand, spare, is_suspect=False)
        assert (back.hosts[0].name, sorted(back.gpus)) == ("host0", ["0", "1"])
        await provisioner.close()

    asyncio.run(scenario())


def test_a_replica_without_room_waits_for_the_replacement_of_its_host_but_not_for_a_second(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        launcher = FakeHosts(hosts_of(2, 1), num_spares=5)
        provisioner = Provisioner(launcher)
        await provisioner.open(tmp_path)
        demand = gpu("generator", 2)
        [place] = provisioner.reserve(demand, 1)
        launcher.gone.add("host0")
        moving = asyncio.ensure_future(provisioner.move(demand, place, is_suspect=False))
        await asyncio.sleep(0.05)
        assert not moving.done()
        launcher.may_replace.set()
        place = await moving
        assert place.hosts[0].name == "host0'"
        launcher.gone.add("host0'")
        with pytest.raises(NotEnoughGPUs, match="generator wants 2 GPUs, 1 of 1 are free"):
            await provisioner.move(demand, place, is_suspect=False)
        assert launcher.num_spares == 4

    asyncio.run(scenario())


def test_a_host_that_can_not_be_replaced_leaves_the_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        launcher = FakeHosts(hosts_of(2))
        launcher.may_replace.set()
        provisioner = Provisioner(launcher)
        await provisioner.open(tmp_path)
        [place] = provisioner.reserve(gpu("generator", 2), 1)
        launcher.gone.add("host0")
        with pytest.raises(ConfigError, match="generator wants a host, and none is left"):
            await provisioner.move(gpu("generator", 2), place, is_suspect=False)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("visible", "gpus"), [("", []), ("0,1", ["0", "1"]), ("GPU-5e, 3", ["GPU-5e", "3"]), ("1,-1,2", ["1"])]
)
def test_gpus_are_those_that_cuda_would_see(
    visible: str, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == gpus


def test_the_table_of_a_plan_imagines_missing_gpus_and_counts_them() -> None:
    demands = [gpu("generator", 1, 2), gpu("trainer", 3), cpu("reward")]
    lines = placement_table(FakeHosts(hosts_of(2, 2)), demands).splitlines()
    assert lines[0].split()[:4] == ["service", "replica", "host", "GPUs"]
    cells = [line.split() for line in lines[1:-1]]
    assert [row[:2] for row in cells] == [
        ["generator", "0"],
        ["generator", "1"],
        ["trainer", "0"],
        ["reward", "0"],
    ]
    assert cells[2] == ["trainer", "0", "host0", "0,1,2", "3", "2"] and cells[3][3:] == ["none", "1", "1"]
    assert lines[-1] == "5 GPUs, 6 processes; 2 hosts have 2 + 2 GPUs, 8 + 8 cores: 1 missing here"
    lines = placement_table(FakeHosts(hosts_of(8)), demands).splitlines()
    assert lines[-1] == "5 GPUs, 6 processes; this machine has 8 GPUs, 8 cores"
