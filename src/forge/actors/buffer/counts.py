"""[4] How many episodes went which way through a replay buffer."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Of episodes, unless something else is said."""

    num_admitted: int = 0  # whose rollout was let in
    num_added: int = 0
    num_repeated: int = 0  # came again, and were not taken again
    num_sampled: int = 0  # handed out, each counted once
    num_reused: int = 0  # handed out again, each time
    num_dropped: int = 0  # past their age, and never handed out
    num_restarted: int = 0  # rollouts that began again, each time
    num_futile: int = 0  # restarts since episodes were last added


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """Where all episodes are: num_added is always num_waiting + num_sampled + num_dropped."""

    version: int  # the trainer's, as far as the buffer knows
    next_number: int  # of the next question
    num_running: int  # rollouts that were let in and have not brought their group
    num_waiting: int  # and were never handed out
    # as in Counts
    num_admitted: int
    num_added: int
    num_sampled: int
    num_reused: int
    num_dropped: int
    num_repeated: int
    num_restarted: int
    num_futile: int
