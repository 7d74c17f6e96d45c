"""Scaling: how many replicas the queue calls for."""

import math

IDLE_BEFORE_SHRINKING_S = 10.0


class QueueFollower:
    """One replica more while calls wait; one less when the rest could have done all for a while."""

    def __init__(self, low: int, high: int, max_concurrent: int, poll_s: float) -> None:
        self._low, self._high = low, high
        self._max_concurrent = max_concurrent
        self._poll_s = poll_s
        self._idle_s = 0.0

    def wanted(self, num_replicas: int, num_running: int, num_waiting: int) -> int:
        """The number to go to, given what is there at this poll."""
        needed = math.ceil((num_running + num_waiting) / self._max_concurrent)
        if needed >= num_replicas:
            self._idle_s = 0.0
            return min(num_replicas + (needed > num_replicas), self._high)
        self._idle_s += self._poll_s
        if self._idle_s < IDLE_BEFORE_SHRINKING_S:
            return num_replicas
        self._idle_s = 0.0
        return max(num_replicas - 1, self._low)
