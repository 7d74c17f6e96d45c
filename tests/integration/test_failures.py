"""Each row of the table in docs/failures.md, on real processes that are really killed."""

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge.controller.provisioner import is_running
from forge.errors import ActorFailure, CallTimeout, FanoutError, ForgeError, ReplicaLost
from tests.integration.machines import Counter, Driver, Follower, Fragile, Ledgerkeeper, Squarer, Visitor
from tests.integration.test_services import children, healed, in_runtime, until


def test_a_call_that_must_not_be_repeated_raises_replica_lost() -> None:
    async def scenario() -> None:
        service = await Fragile.options(num_replicas=2).as_service()
        for endpoint in (service.pid_once, service.pid.options(retry=False)):
            await healed(service)
            call = asyncio.ensure_future(endpoint.route(30))
            [victim] = [r.pids[0] for r in await until_loaded(service)]
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(ReplicaLost, match=r"fragile\.pid.*the process of replica \d is gone.*sig=9"):
                await asyncio.wait_for(call, 20)

    in_runtime(scenario)


def test_a_call_that_kills_whoever_serves_it_is_given_up() -> None:
    async def scenario() -> None:
        service = await Fragile.options(num_replicas=2).as_service()
        with pytest.raises(ReplicaLost, match="this call may be what kills them"):
            await asyncio.wait_for(service.die.route(), 90)
        assert len(set(await asyncio.gather(*(service.pid.route() for _ in range(4))))) >= 1

    in_runtime(scenario)


def test_an_endpoint_that_exits_is_an_error_and_not_the_end_of_its_process() -> None:
    async def scenario() -> None:
        service = await Fragile.as_service()
        pid = await service.pid.route()
        with pytest.raises(ActorFailure, match=r"SystemExit\('enough'\)"):
            await service.leave.route()
        assert await service.pid.route() == pid

    in_runtime(scenario)


def test_all_replicas_down_fails_after_a_bounded_wait_with_the_reason_of_each(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = await Fragile.options(num_replicas=2, down_timeout_s=2).as_service(str(tmp_path))
        (tmp_path / "no_more_starts").touch()
        for replica in await service.replicas():
            os.kill(replica.pids[0], signal.SIGKILL)
        await until(lambda: not service._client.dispatcher().lanes)
        started = time.monotonic()
        with pytest.raises(ActorFailure, match=r"all replicas are down.*replica 0: .*replica 1: "):
            await service.pid.route()
        assert time.monotonic() - started < 8

    in_runtime(scenario)


def test_a_crash_loop_backs_off_and_ends_in_a_degraded_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        service = await Fragile.options(num_replicas=2).as_service(str(tmp_path))
        (tmp_path / "no_more_starts").touch()
        os.kill((await service.replicas())[0].pids[0], signal.SIGKILL)
        await until_async(lambda: _states(service), lambda states: states == ["failed", "healthy"], 60)
        assert "fragile is degraded" in caplog.text and "the disk has no room" in caplog.text
        assert len({await service.pid.route() for _ in range(4)}) == 1  # the other one goes on
        assert len(await service.pid.fanout()) == 1

    caplog.set_level(logging.ERROR, "forge")
    in_runtime(scenario)


def test_a_replica_that_hangs_is_killed_and_replaced_and_its_call_is_repeated(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = await Fragile.options(num_replicas=1, health_poll_rate=0.2, health_timeout_s=2).as_service(
            str(tmp_path)
        )
        victim = await service.pid.route()
        answer = await asyncio.wait_for(service.block_once.route(1000), 60)
        assert answer != victim and not is_running(victim)
        await healed(service)
        [replica] = await service.replicas()
        assert replica.restarts == 1 and "did not answer for 2 s" in (replica.reason or "")

    in_runtime(scenario)


def test_a_frozen_process_is_replaced_too() -> None:
    async def scenario() -> None:
        service = await Fragile.options(num_replicas=2, health_poll_rate=0.2, health_timeout_s=2).as_service()
        victim = (await service.replicas())[0].pids[0]
        os.kill(victim, signal.SIGSTOP)
        answers = await asyncio.wait_for(asyncio.gather(*(service.pid.route(0.1) for _ in range(8))), 60)
        assert victim not in answers
        await until(lambda: not is_running(victim), 30)
        await healed(service)

    in_runtime(scenario)


def test_a_deadline_cancels_the_call_where_it_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = await Fragile.options(timeout_s=1.0).as_service(str(tmp_path))
        with pytest.raises(
            CallTimeout, match=r"fragile\.linger was not done within 1 s: it was at replica 0"
        ):
            await service.linger.route("default", 60)
        with pytest.raises(CallTimeout, match=r"within 0\.3 s"):
            await service.linger.options(timeout_s=0.3).route("own", 60)
        # together, so that they share a message
        patient = service.linger.options(timeout_s=None)
        outcomes = await asyncio.gather(
            patient.route("long", 1.5),
            *(service.linger.options(timeout_s=0.5).route(f"short{i}", 60) for i in range(3)),
            return_exceptions=True,
        )
        assert outcomes[0] is None and all(isinstance(o, CallTimeout) for o in outcomes[1:])
        given_up = asyncio.ensure_future(patient.route("task", 60))
        await asyncio.sleep(0.3)
        given_up.cancel()
        names = ("default", "own", "short0", "short1", "short2", "task")
        await until(lambda: all((tmp_path / name).exists() for name in names))
        assert {(tmp_path / name).read_text() for name in names} == {"cancelled"}
        assert (tmp_path / "long").read_text() == "finished"

    in_runtime(scenario)


def test_a_deadline_also_ends_the_wait_for_a_replica() -> None:
    async def scenario() -> None:
        service = await Fragile.options(max_concurrent=1).as_service()
        holder = asyncio.ensure_future(service.pid.route(2))
        await asyncio.sleep(0.1)
        with pytest.raises(CallTimeout, match="waiting for a replica"):
            await service.pid.options(timeout_s=0.3).route()
        await holder
        assert await service.pid.options(timeout_s=5).route() == await service.pid.route()

    in_runtime(scenario)


def test_a_session_moves_with_a_warning_when_its_replica_dies(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        service = await Fragile.options(num_replicas=3).as_service()
        async with service.session():
            first = await service.pid.route()
            async with service.session():
                inner = {await service.pid.route() for _ in range(3)}
            assert len(inner) == 1
            assert {await service.pid.route() for _ in range(3)} == {first}
            os.kill(first, signal.SIGKILL)
            after = {await service.pid.route(0.05) for _ in range(4)}
            assert len(after) == 1 and first not in after
        assert "a session moves to another replica" in caplog.text

    caplog.set_level(logging.WARNING, "forge")
    in_runtime(scenario)


def test_a_replica_runs_no_more_calls_than_its_limit_whoever_makes_them() -> None:
    async def scenario() -> None:
        service = await Fragile.options(max_concurrent=2, num_replicas=2).as_service()
        visitor = await Visitor.as_actor(service)
        outside = asyncio.ensure_future(visitor.visit.call_one(12, 0.1))
        most = await asyncio.gather(*(service.count.route(0.1) for _ in range(20)))
        await outside
        assert max(most) == 2

    in_runtime(scenario)


def test_calls_wait_in_the_order_in_which_they_came() -> None:
    async def scenario() -> None:
        service = await Fragile.options(max_concurrent=1).as_service()
        order: list[int] = []

        async def ask(number: int) -> None:
            await service.pid.route(0.02)
            order.append(number)

        await asyncio.gather(*(ask(i) for i in range(30)))
        assert order == list(range(30))

    in_runtime(scenario)


def test_a_handle_that_has_travelled_learns_of_respawned_replicas() -> None:
    async def scenario() -> None:
        service = await Fragile.options(num_replicas=2).as_service()
        visitor = await Visitor.as_actor(service)
        before = set(await visitor.visit.call_one(8))
        assert before == {r.pids[0] for r in await service.replicas()}
        assert len(await visitor.stay.call_one(6)) == 1
        calls = asyncio.ensure_future(visitor.visit.call_one(6, 1.0))
        await asyncio.sleep(0.4)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        assert victim not in await asyncio.wait_for(calls, 30)
        await healed(service)
        now = {r.pids[0] for r in await service.replicas()}
        assert set(await visitor.visit.call_one(8)) == now and victim not in now
        assert await visitor.states.call_one() == ["healthy", "healthy"]
        assert await visitor.grow.call_one(3) == 3 == len(await service.replicas())
        await service.shutdown()
        with pytest.raises(ActorFailure, match="was shut down"):
            await asyncio.wait_for(visitor.visit.call_one(1), 20)

    in_runtime(scenario)


def test_a_replica_outlives_a_caller_that_dies_while_it_waits() -> None:
    async def scenario() -> None:
        service = await Fragile.as_service()
        visitor = await Visitor.options(num_replicas=1).as_service(service)
        calls = asyncio.ensure_future(visitor.visit.options(retry=False).route(5, 1.5))
        [pid] = [r.pids[0] for r in await until_loaded(service)]
        os.kill((await visitor.replicas())[0].pids[0], signal.SIGKILL)
        with pytest.raises(ReplicaLost):
            await calls
        await asyncio.sleep(2.5)  # the answers find nobody
        assert await service.pid.route() == pid
        assert (await service.replicas())[0].restarts == 0

    in_runtime(scenario)


def test_a_fanout_leaves_out_whom_it_can_catch_up_and_names_whom_it_cannot(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "value"
        file.write_text("1")
        service = await Follower.options(num_replicas=3).as_service(str(file))
        os.kill((await service.replicas())[0].pids[0], signal.SIGKILL)
        file.write_text("2")
        assert len(await service.take.fanout(2)) >= 2
        await healed(service)
        assert {value for _, value in await service.tell.fanout()} == {2}
        assert (await service.replicas())[0].version == 2
        plain = await Counter.options(num_replicas=2).as_service()
        calls = asyncio.ensure_future(plain.wait.fanout(2))
        await asyncio.sleep(0.3)
        os.kill((await plain.replicas())[0].pids[0], signal.SIGKILL)
        with pytest.raises(FanoutError, match="1 of 2 replicas failed: replica 0: ReplicaLost") as raised:
            await calls
        assert list(raised.value.results) == [1]

    in_runtime(scenario)


def test_a_fanout_during_a_respawn_is_never_missed(tmp_path: Path) -> None:
    """The value changes all the time; no replica ever tells one older than the last fanout's."""

    async def scenario() -> None:
        file = tmp_path / "value"
        file.write_text("0")
        service = await Follower.options(num_replicas=3).as_service(str(file))
        for round in range(1, 41):
            if round % 8 == 1:
                os.kill(await _some_pid(service), signal.SIGKILL)
            file.write_text(str(round))
            await service.take.fanout(round)
            told = await asyncio.gather(*(service.tell.route() for _ in range(6)))
            assert {value for _, value in told} == {round}
        await healed(service)
        assert {value for _, value in await service.tell.fanout()} == {40}

    in_runtime(scenario)


def test_a_single_actor_is_replaced_only_when_it_recovers_its_state() -> None:
    async def scenario() -> None:
        keeper = await Ledgerkeeper.as_actor()
        assert await keeper.deposit.call_one(5) == 5
        total = 5
        for amount in range(1, 13):
            call = asyncio.ensure_future(keeper.deposit.call_one(amount))
            if amount % 3 == 0:
                await asyncio.sleep(0.0005 * amount)
                [replica] = await keeper.replicas()
                for pid in replica.pids:
                    os.kill(pid, signal.SIGKILL)
            total += amount
            assert await asyncio.wait_for(call, 30) == total
        forgetful = await Counter.as_actor()
        os.kill((await forgetful.replicas())[0].pids[0], signal.SIGKILL)
        with pytest.raises(ActorFailure, match="counter"):
            await asyncio.wait_for(forgetful.add.call_one(), 20)
        with pytest.raises(ActorFailure, match="none is being replaced any more.*sig=9"):
            await forgetful.add.call_one()

    in_runtime(scenario)


def test_a_service_scales_up_and_drains_before_it_scales_down(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = await Fragile.options(num_replicas=1).as_service(str(tmp_path))
        await service.scale(4)
        pids = await service.pid.fanout()
        assert len(set(pids)) == 4
        running = [asyncio.ensure_future(service.linger.route(f"call{i}", 1.0)) for i in range(8)]
        await asyncio.sleep(0.2)
        await service.scale(2)
        await asyncio.gather(*running)
        assert {(tmp_path / f"call{i}").read_text() for i in range(8)} == {"finished"}
        assert sorted(await service.pid.fanout()) == sorted(pids[:2])
        await until(lambda: not any(is_running(pid) for pid in pids[2:]))

    in_runtime(scenario)


def test_a_failed_replica_makes_room_and_is_never_the_one_that_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = await Fragile.options(num_replicas=2).as_service(str(tmp_path))
        (tmp_path / "no_more_starts").touch()
        os.kill((await service.replicas())[0].pids[0], signal.SIGKILL)
        await until_async(lambda: _states(service), lambda states: states == ["failed", "healthy"], 60)
        await service.scale(1)
        assert await _states(service) == ["healthy"]
        with pytest.raises(ForgeError, match="the disk has no room"):
            await service.scale(3)
        assert await _states(service) == ["healthy"] and await service.pid.route() > 0
        (tmp_path / "no_more_starts").unlink()
        await service.scale(2)
        assert len(set(await service.pid.fanout())) == 2

    in_runtime(scenario)


def test_a_service_that_is_shut_down_while_it_grows_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        before = children()
        service = await Fragile.options(num_replicas=1).as_service(str(tmp_path))
        (tmp_path / "slow_starts").touch()
        growing = asyncio.ensure_future(service.scale(3))
        await asyncio.sleep(1)
        await service.shutdown()
        with pytest.raises(ActorFailure, match="was shut down"):
            await growing
        with pytest.raises(ActorFailure, match="was shut down"):
            await service.pid.route()
        await until(lambda: children() == before)

    in_runtime(scenario)


def test_ranks_call_each_other_however_few_calls_may_run() -> None:
    async def scenario() -> None:
        driver = await Driver.options(procs=2, max_concurrent=1).as_service()
        assert await asyncio.wait_for(driver.ranks.route(), 20) == [0, 1]

    in_runtime(scenario)


def test_a_call_from_elsewhere_waits_for_the_only_replica_to_come_back() -> None:
    async def scenario() -> None:
        service = await Fragile.as_service()
        visitor = await Visitor.as_actor(service)
        [victim] = await visitor.visit.call_one(1)
        calls = asyncio.ensure_future(visitor.visit.call_one(3, 1.0))
        await asyncio.sleep(0.3)
        os.kill(victim, signal.SIGKILL)
        assert victim not in await asyncio.wait_for(calls, 30)

    in_runtime(scenario)


def test_a_replica_that_is_being_replaced_can_be_scaled_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        before = children()
        service = await Fragile.options(num_replicas=2).as_service(str(tmp_path))
        (tmp_path / "slow_starts").touch()
        os.kill((await service.replicas())[1].pids[0], signal.SIGKILL)
        await until_async(lambda: _states(service), lambda states: states == ["healthy", "loading"], 20)
        await service.scale(1)
        assert await _states(service) == ["healthy"]
        await asyncio.sleep(3)
        assert await _states(service) == ["healthy"] and len(await service.pid.fanout()) == 1
        assert len(children() - before) == 1  # the replica's process, and none that nobody knows

    in_runtime(scenario)


def test_a_process_that_has_not_answered_yet_is_not_left_behind() -> None:
    async def scenario() -> None:
        before = children()
        service = await Fragile.as_service()
        [first] = (await service.replicas())[0].pids
        os.kill(first, signal.SIGKILL)
        await until(lambda: bool(children() - before - {first}))
        await asyncio.sleep(0.3)  # Monarch knows of it
        [new] = children() - before - {first}
        os.kill(new, signal.SIGSTOP)
        await service.shutdown()
        await until(lambda: children() == before, 5)

    in_runtime(scenario)


def test_the_number_of_replicas_follows_the_queue() -> None:
    async def scenario() -> None:
        service = await Fragile.options(
            min_replicas=1, max_replicas=3, max_concurrent=2, health_poll_rate=0.2
        ).as_service()
        load = [asyncio.ensure_future(service.pid.route(0.5)) for _ in range(60)]
        answers = await asyncio.gather(*load)
        assert len(set(answers)) == 3
        await until_async(lambda: _states(service), lambda states: len(states) == 1, 60)

    in_runtime(scenario)


def test_20_kills_in_2000_calls_reach_no_caller() -> None:
    """3 replicas, 16 tasks; every call gets its own answer, once."""

    async def scenario() -> None:
        service = await Squarer.options(num_replicas=3).as_service()
        todo = iter(range(2000))
        answers: list[tuple[int, int]] = []

        async def work() -> None:
            for number in todo:
                answers.append((number, await service.square.route(number)))

        async def kill(num_kills: int) -> None:
            dice = random.Random(0)
            while num_kills:
                alive = [r.pids[0] for r in await service.replicas() if r.state.value == "healthy"]
                alive = [pid for pid in alive if is_running(pid)]
                if alive:
                    os.kill(dice.choice(alive), signal.SIGKILL)
                    num_kills -= 1
                await asyncio.sleep(0.6 * dice.random())

        await asyncio.wait_for(asyncio.gather(kill(20), *(work() for _ in range(16))), 240)
        assert sorted(answers) == [(n, n * n) for n in range(2000)]
        await healed(service)
        states = await service.replicas()
        assert len(states) == 3 and sum(r.restarts for r in states) == 20

    in_runtime(scenario)


def test_the_root_survives_its_children_and_ends_with_sigterm_leaving_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, sys\n"
        "from forge.controller import Runtime\n"
        "from tests.integration.machines import Fragile\n"
        "async def main():\n"
        "    async with Runtime() as runtime:\n"
        "        service = await Fragile.options(num_replicas=2).as_service()\n"
        "        print(runtime.folder, *(await service.pid.fanout()), flush=True)\n"
        "        await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = ""
    while not line.startswith("/"):
        line = process.stdout.readline()
        assert line, process.communicate()[1][-3000:]
    folder, *pids = line.split()
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)
    time.sleep(3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 143, errors[-3000:]
    assert time.monotonic() - started < 10
    assert not Path(folder).exists()


async def until_loaded(service) -> list:
    """The replicas that run a call, once there is one."""
    return await until_async(lambda: _loaded(service), bool, 20)


async def until_async(look, good, seconds: float):
    deadline = time.monotonic() + seconds
    while not good(seen := await look()):
        assert time.monotonic() < deadline, seen
        await asyncio.sleep(0.1)
    return seen


async def _loaded(service) -> list:
    return [replica for replica in await service.replicas() if replica.load]


async def _states(service) -> list[str]:
    return [replica.state.value for replica in await service.replicas()]


async def _some_pid(service) -> int:
    return next(r.pids[0] for r in await service.replicas() if r.state.value == "healthy")
