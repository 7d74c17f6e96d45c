"""gloo, PyTorch's transport between CPUs, with one thread for each group of processes."""

import os
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, distributed_c10d
from torch.distributed.constants import default_pg_timeout


class OneThreadGloo(ProcessGroupGloo):
    """What begins on a group runs in that order, one after the other.

    PyTorch gives a group two threads. In torch 2.13 memory is then now and then freed twice where functional
    collectives of a group are under way at once, as DTensor and context parallelism have them.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta = default_pg_timeout) -> None:
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._threads = 1
        options._timeout = timeout
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        create = ProcessGroupGloo.create_device
        devices = [create(interface=name) for name in names] or [ProcessGroupGloo.create_default_device()]
        options._devices = devices
        super().__init__(store, rank, size, options)


def use_one_thread() -> None:
    """For every group of gloo's that this process makes from now on."""
    distributed_c10d.ProcessGroupGloo = OneThreadGloo
