"""Process: who reads or writes weights, so that one that is gone can be told from one that is slow."""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forge.weights.transport import host_identity


@dataclass(frozen=True, slots=True)
class Process:
    host: str
    pid: int
    started: str  # clock ticks since boot: pids are reused

    @classmethod
    @cache
    def this(cls) -> "Process":
        return cls(host_identity(), os.getpid(), _start_time(os.getpid()))

    @property
    def is_near(self) -> bool:
        """Whether it is a process of this host."""
        return self.host == host_identity()

    def is_gone(self) -> bool:
        """Whether it is known to have ended, which only processes of its host can know."""
        if not self.is_near:
            return False
        try:
            return _start_time(self.pid) != self.started
        except (FileNotFoundError, ProcessLookupError):
            return True


def _start_time(pid: int) -> str:
    # the name of the program, in parentheses, may hold anything; a zombie's fields are those of a process
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if fields[0] == "Z":
        raise ProcessLookupError(pid)
    return fields[19]
