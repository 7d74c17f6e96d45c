"""Transport: which way bytes take between a process and a volume."""

import enum
import os
import socket
from functools import cache

from forge.errors import ConfigError
from forge.weights._torchstore import is_ibverbs_available

HOST_VARIABLE = "FORGE_WEIGHTS_HOST"
_RDMA = "/rdma"  # ends the identity of a host that has the hardware


class Transport(enum.Enum):
    """The value is how a log names it."""

    SHARED_MEMORY = "shared memory"
    RDMA = "RDMA"
    MESSAGES = "Monarch messages"

    @classmethod
    def between(cls, volume_host: str) -> "Transport":
        """The fastest way between this process and a volume; volume_host: the latter's `host_identity`.

        RDMA takes hardware at both ends. TORCHSTORE_USE_RDMA=1 takes it between hosts also where there is
        none (Monarch then speaks TCP), =0 takes messages also where there is.
        """
        wish = rdma_wish()
        here = host_identity()
        if volume_host == here:
            return cls.SHARED_MEMORY
        able = here.endswith(_RDMA) and volume_host.endswith(_RDMA)
        return cls.RDMA if wish == "1" or (not wish and able) else cls.MESSAGES


def rdma_wish() -> str:
    """What TORCHSTORE_USE_RDMA says: "1", "0", or "" where it is not set. Raises ConfigError otherwise."""
    wish = os.environ.get("TORCHSTORE_USE_RDMA", "")
    if wish not in ("", "0", "1"):
        raise ConfigError(f"TORCHSTORE_USE_RDMA must be 0 or 1, or not set, got {wish!r}")
    return wish


@cache
def host_identity() -> str:
    """Equal in two processes if each can open the other's descriptors: same boot, pid namespace and user.

    Processes whose FORGE_WEIGHTS_HOST differs count as on different hosts, which is how tests play several.
    Ends with whether there is hardware for RDMA.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    name = os.environ.get(HOST_VARIABLE) or socket.gethostname()
    rdma = _RDMA if is_ibverbs_available() else "/tcp"
    return f"{name}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.geteuid()}{rdma}"
