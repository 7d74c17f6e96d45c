"""Who waits for whom: the graph of reports, and how it is told."""

import asyncio
import re
from dataclasses import replace

from forge.controller.process_report import (
    Frame,
    ProcessReport,
    ServedCall,
    TaskStack,
    ThreadStack,
    WaitingCall,
    from_json,
    to_json,
)
from forge.controller.wait_graph import Place, join
from forge.controller.wait_text import render

NOW = 1000.0
STEP = (
    Frame("/home/me/site-packages/monarch/_src/actor/concurrent.py", 50, "run"),
    Frame("/home/me/src/forge/controller/host.py", 140, "ActorHost._serve"),
    Frame("/home/me/src/forge/actors/trainer/titan.py", 112, "TitanTrainer.train_step"),
)


def waiting(id: str, task: str, target: str, replica: int | None = None, pid: int | None = None, **more):
    service, method = target.split(".")
    values = {"parent": None, "since": NOW - 73.2, "replica": replica, "pid": pid, **more}
    return WaitingCall(id, task=task, service=service, method=method, **values)


def served(id: str, method: str, stack=STEP, runs_s: float = 73.1, **more) -> ServedCall:
    return ServedCall(id, "root/learn", method, NOW - runs_s, stack=stack, **more)


def report(pid: int, actor: str, outgoing=(), serving=(), **more) -> ProcessReport:
    values = {"at": NOW, "idle_s": 74.0, **more}
    return ProcessReport(pid, actor, outgoing=tuple(outgoing), served=tuple(serving), **values)


def test_a_call_is_followed_to_the_stack_of_who_serves_it() -> None:
    root = report(1, "root", [waiting("a", "learn", "trainer.train_step", 0, 4711)])
    trainer = report(4711, "trainer[0]", serving=[served("a", "train_step")])
    assert render(join([root, trainer])).splitlines() == [
        "root/learn  waits 73.2 s for trainer[0].train_step   (pid 4711)",
        "  trainer[0].train_step  runs 73.1 s; waits for no call; stack of pid 4711:",
        "     forge/actors/trainer/titan.py:112 TitanTrainer.train_step",
        "nothing has moved for 74 s; what is waited for: trainer[0].train_step",
    ]


def test_of_hidden_frames_only_what_the_users_code_called_last_is_shown() -> None:
    inside = tuple(
        Frame(asyncio.locks.__file__, line, name) for line, name in ((9, "Lock.acquire"), (4, "f"))
    )
    package = tuple(Frame(f"/x/site-packages/torch/{name}.py", 5, name) for name in ("a", "b", "c"))
    trainer = report(2, "trainer[0]", serving=[served("a", "train_step", STEP + package + STEP[2:] + inside)])
    assert render(join([trainer])).splitlines()[2:-1] == [
        "     forge/actors/trainer/titan.py:112 TitanTrainer.train_step",
        "     torch/a.py:5 a",
        "     torch/c.py:5 c",
        "     forge/actors/trainer/titan.py:112 TitanTrainer.train_step",
        "     asyncio/locks.py:9 Lock.acquire",
    ]


def test_an_endpoint_that_waits_is_followed_to_the_end() -> None:
    root = report(1, "root", [waiting("a", "learn", "trainer.train_step", 0, 2)])
    trainer = report(
        2,
        "trainer[0]",
        [waiting("b", "Task-9", "buffer.sample", 0, 3, parent="a")],
        [served("a", "train_step")],
    )
    buffer = report(3, "buffer[0]", serving=[served("b", "sample", runs_s=70.0)])
    lines = render(join([root, trainer, buffer])).splitlines()
    assert lines[:3] == [
        "root/learn  waits 73.2 s for trainer[0].train_step   (pid 2)",
        "  trainer[0].train_step  waits 73.2 s for buffer[0].sample   (pid 3)",
        "    buffer[0].sample  runs 70.0 s; waits for no call; stack of pid 3:",
    ]
    assert lines[-1].endswith("what is waited for: buffer[0].sample")


def test_calls_in_the_queue_are_one_line_with_what_their_service_does() -> None:
    queue = [
        waiting(f"q{i}", f"rollout {i}", "generator.generate", since=NOW - 50 - i / 20) for i in range(8)
    ]
    generators = [report(10 + i, f"generator[{i}]", serving=[served(f"x{i}", "update")]) for i in range(2)]
    root = report(1, "root", [*queue, waiting("x0", "learn", "generator.update", 0, 10)])
    lines = render(join([root, *generators])).splitlines()
    assert lines[0].startswith("root/learn") and "73.2 s" in lines[0]  # the longest first
    assert (
        "8 tasks: root/rollout 0..7  wait 50.4 s for generator.generate, in the queue (2 replicas, 0 idle)"
        in lines
    )


def test_ranks_of_one_call_are_grouped_by_where_they_are() -> None:
    stuck = (Frame("/home/me/site-packages/torch/distributed/c10d.py", 9, "all_reduce"),)
    root = report(1, "root", [waiting("a", "learn", "trainer.train_step", 0, 20)])
    ranks = [
        report(
            20 + i, f"trainer[0].{i}", serving=[served("a", "train_step", STEP if i == 2 else STEP + stuck)]
        )
        for i in range(4)
    ]
    text = render(join([root, *ranks]))
    assert "trainer[0].train_step on ranks 0..1, 3  runs 73.1 s; waits for no call; stack of pid 20:" in text
    assert "trainer[0].train_step on rank 2  runs" in text
    assert "torch/distributed/c10d.py:9 all_reduce" in text


def test_a_call_to_a_process_that_is_gone_says_so() -> None:
    root = report(1, "root", [waiting("a", "learn", "trainer.train_step", 0, 99)])
    stale = ProcessReport(99, problem="process 99 is gone", is_gone=True)
    for reports in ([root], [root, stale]):
        graph = join(reports)
        assert graph.waits[0].place is Place.GONE
        assert "for trainer[0].train_step: process 99 is gone, or on another machine" in render(graph)


def test_a_process_that_does_not_answer_is_shown_from_outside() -> None:
    root = report(1, "root", [waiting("a", "learn", "trainer.train_step", 0, 99)])
    silent = ProcessReport(
        99, problem="process 99 does not answer", dump='Thread 99 (idle): "MainThread"\n  f'
    )
    text = render(join([root, silent]))
    assert "for trainer[0].train_step, which does not answer, see below   (pid 99)" in text
    assert 'process 99 does not answer; seen from outside:\n  Thread 99 (idle): "MainThread"' in text


def test_a_queue_before_busy_replicas_is_not_what_is_waited_for() -> None:
    root = report(1, "root", [waiting("q", "r", "generator.go"), waiting("a", "l", "generator.go", 0, 2)])
    busy = report(2, "generator[0]", serving=[served("a", "go")])
    assert render(join([root, busy])).endswith("what is waited for: generator[0].go")
    assert render(join([root])).endswith("what is waited for: generator.go, generator[0].go")


def test_a_call_that_has_not_begun_names_the_blocked_loop_and_its_stack() -> None:
    root = report(1, "root", [waiting("a", "learn", "trainer.weights", 0, 2)])
    thread = ThreadStack("MainThread", True, STEP)
    trainer = report(2, "trainer[0]", loop_blocked=True, threads=(thread,))
    text = render(join([root, trainer]))
    assert "for trainer[0].weights, which has not begun: its event loop is blocked, see below" in text
    assert "the event loop of trainer[0] (pid 2) is blocked:\n   forge/actors/trainer/titan.py:112" in text


def test_replicas_that_wait_for_each_others_queue_are_a_deadlock() -> None:
    trainer = report(
        2, "trainer[0]", [waiting("b", "t", "generator.sync", parent="a")], [served("a", "train_step")]
    )
    generator = report(
        3, "generator[0]", [waiting("c", "t", "trainer.weights", parent="g")], [served("g", "generate")]
    )
    root = report(
        1,
        "root",
        [waiting("a", "learn", "trainer.train_step", 0, 2), waiting("g", "roll", "generator.generate", 0, 3)],
    )
    told = (
        "deadlock: generator[0].generate waits for trainer.weights (in the queue) waits for "
        "trainer[0].train_step waits for generator.sync (in the queue) waits for generator[0].generate"
    )
    assert join([root, trainer, generator]).circles == (told,)
    assert told in render(join([root, trainer, generator])).splitlines()


def test_a_queue_that_one_free_replica_can_empty_is_no_deadlock() -> None:
    trainer = report(
        2, "trainer[0]", [waiting("b", "t", "generator.sync", parent="a")], [served("a", "train_step")]
    )
    stuck = report(
        3, "generator[0]", [waiting("c", "t", "trainer.weights", parent="g")], [served("g", "generate")]
    )
    works = report(4, "generator[1]", serving=[served("h", "generate")])
    root = report(1, "root", [waiting("a", "learn", "trainer.train_step", 0, 2)])
    assert join([root, trainer, stuck, works]).circles == ()


def test_a_call_that_comes_back_and_waits_is_perhaps_a_deadlock() -> None:
    def reports(back: ServedCall) -> list[ProcessReport]:
        root = report(1, "root", [waiting("a", "learn", "trainer.train_step", 0, 2)])
        trainer = report(
            2,
            "trainer[0]",
            [waiting("b", "t", "generator.sync", 0, 3, parent="a")],
            [served("a", "train_step"), back],
        )
        generator = report(
            3, "generator[0]", [waiting("c", "t", "trainer.weights", 0, 2, parent="b")], [served("b", "sync")]
        )
        return [root, trainer, generator]

    assert join(reports(served("c", "weights"))).circles == (
        "perhaps a deadlock: trainer[0].train_step waits for generator[0].sync waits for trainer[0].weights, "
        "which waits inside trainer[0]",
    )
    assert join(reports(served("c", "weights", is_executing=True))).circles == ()


def test_a_call_that_comes_back_to_an_actor_that_takes_one_at_a_time_is_a_deadlock() -> None:
    turn = (STEP[1], Frame(asyncio.locks.__file__, 387, "Semaphore.acquire"))
    root = report(1, "root", [waiting("a", "learn", "trainer.train_step", 0, 2)])
    serving = [served("a", "train_step"), served("c", "weights", turn)]
    trainer = report(2, "trainer[0]", [waiting("b", "t", "generator.sync", 0, 3, parent="a")], serving)
    calls = [waiting("c", "t", "trainer.weights", 0, 2, parent="b")]
    generator = report(3, "generator[0]", calls, [served("b", "sync")])
    graph = join([root, trainer, generator])
    assert graph.circles == (
        "deadlock: generator[0].sync waits for trainer[0].weights waits for trainer[0].train_step waits for "
        "generator[0].sync",
    )
    assert "trainer[0].weights  waits 73.1 s for its turn: the actor is busy" in render(graph)


def test_an_actor_that_calls_its_own_ranks_is_no_circle() -> None:
    root = report(1, "root", [waiting("a", "learn", "trainer.train_step", 0, 20)])
    calls = [waiting("b", "t", "peers.step", parent="a")]
    calls = [replace(calls[0], service="trainer[0].0")]
    first = report(20, "trainer[0].0", calls, [served("a", "train_step"), served("b", "step")])
    second = report(21, "trainer[0].1", serving=[served("b", "step")])
    graph = join([root, first, second])
    assert graph.circles == ()
    assert "  trainer[0].train_step  waits 73.2 s for trainer[0].step   (pid 20)" in render(graph)
    assert "trainer[0].step on ranks 0..1  runs" in render(graph)


def test_an_endpoint_whose_caller_does_not_answer_is_shown_too() -> None:
    trainer = report(2, "trainer[0]", serving=[served("a", "train_step")])
    text = render(join([ProcessReport(1, problem="process 1 does not answer"), trainer]))
    assert "nobody who answers waits for this, it was called by root/learn:\n  trainer[0].train_step" in text


def test_threads_and_tasks_that_may_be_the_cause_are_shown() -> None:
    engine = (Frame("/home/me/src/forge/actors/_vllm/engine_loop.py", 7, "EngineLoop._run"),)
    threads = (
        ThreadStack("engine", False, engine),
        ThreadStack("idle", False, (Frame(re.__file__, 1, "wait"),)),
    )
    roll = (Frame("/home/me/apps/grpo/main.py", 33, "roll"),)
    tasks = tuple(TaskStack(f"rollout {i}", roll) for i in range(4))
    root = report(1, "root", [waiting("a", "rollout 0", "generator.generate", 0, 2)], tasks=tasks)
    generator = report(2, "generator[0]", serving=[served("a", "generate")], threads=threads)
    lines = render(join([root, generator])).splitlines()
    at = lines.index("thread engine of generator[0] (pid 2):")
    assert lines[at + 1] == "   forge/actors/_vllm/engine_loop.py:7 EngineLoop._run"
    assert "root/rollout 1..3  waits for no call, in grpo/main.py:33 roll" in lines
    assert not any("thread idle" in line for line in lines)


def test_nothing_outstanding_is_said_in_one_line() -> None:
    assert render(join([report(1, "root")]), idle_s=3) == "nothing has moved for 3 s; no call is outstanding"


def test_reports_survive_their_journey() -> None:
    full = report(
        1,
        "root",
        [waiting("a", "learn", "trainer.train_step", 0, 2, parent="p")],
        [served("p", "x")],
        tasks=(TaskStack("t", STEP),),
        threads=(ThreadStack("MainThread", True, STEP),),
    )
    assert from_json(to_json(full)) == full
