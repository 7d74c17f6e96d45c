"""How many replicas the queue calls for, poll by poll."""

from forge.controller.scaling import IDLE_BEFORE_SHRINKING_S, QueueFollower


def test_it_grows_by_one_a_poll_while_calls_wait_up_to_the_limit() -> None:
    follower = QueueFollower(1, 3, max_concurrent=4, poll_s=1.0)
    assert follower.wanted(1, num_running=4, num_waiting=0) == 1  # just full
    assert follower.wanted(1, num_running=4, num_waiting=1) == 2
    assert follower.wanted(2, num_running=8, num_waiting=100) == 3
    assert follower.wanted(3, num_running=12, num_waiting=100) == 3


def test_it_shrinks_by_one_only_after_a_while_without_need_down_to_the_limit() -> None:
    follower = QueueFollower(1, 3, max_concurrent=4, poll_s=2.0)
    polls = int(IDLE_BEFORE_SHRINKING_S / 2.0)
    answers = [follower.wanted(3, num_running=4, num_waiting=0) for _ in range(polls)]
    assert answers == [3] * (polls - 1) + [2]
    for _ in range(polls - 1):
        assert follower.wanted(2, num_running=0, num_waiting=0) == 2
    assert follower.wanted(2, num_running=8, num_waiting=0) == 2  # needed again: the pause begins anew
    for _ in range(polls - 1):
        assert follower.wanted(2, num_running=0, num_waiting=0) == 2
    assert follower.wanted(2, num_running=0, num_waiting=0) == 1
    for _ in range(3 * polls):
        assert follower.wanted(1, num_running=0, num_waiting=0) == 1
