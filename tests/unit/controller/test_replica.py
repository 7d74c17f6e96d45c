"""When a replica is given up, and how long it pauses before that."""

import time

import pytest

from forge.controller.host import Pulse
from forge.controller.replica import MAX_FAILURES, Replica


def test_deaths_without_an_answer_in_between_add_up_and_the_pauses_grow() -> None:
    replica = Replica(0, [])
    pauses = []
    for _ in range(MAX_FAILURES):
        replica.become_healthy()
        replica.count_loss(num_answered=0, num_running=0)
        pauses.append(replica.backoff_s())
    assert replica.failures == MAX_FAILURES
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("how", ["answered here", "answered elsewhere", "lived long"])
def test_one_that_worked_before_it_died_begins_anew(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(0, [])
    replica.failures = 3
    replica.become_healthy()
    if how == "answered elsewhere":
        replica.pulse = Pulse(1, 0, num_done=1)
    if how == "lived long":
        now = time.monotonic()
        monkeypatch.setattr("forge.controller.replica.time.monotonic", lambda: now + 31)
    replica.count_loss(num_answered=int(how == "answered here"), num_running=0)
    assert replica.failures == 0 and replica.backoff_s() == 0


def test_one_that_died_with_a_call_is_not_blamed_for_it() -> None:
    replica = Replica(0, [])
    for _ in range(3 * MAX_FAILURES):
        replica.become_healthy()
        replica.count_loss(num_answered=0, num_running=1)
    assert replica.failures == 0
