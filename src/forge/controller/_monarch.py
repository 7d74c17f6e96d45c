"""The only door to Monarch: sets what must be set before its import, then names what forge uses of it."""

import contextlib
import os

# Monarch polls for dead processes; by default a death is noticed after up to 10 s, a frozen one after 60 s.
for _key, _value in {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms",
    # how long a process may be silent before it counts as frozen: on a busy machine sound ones are, and to
    # replace one costs more than to notice a lost host some seconds later
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "15s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "15s",
    # how long a stop waits for an actor that is busy before its process is killed
    "HYPERACTOR_CLEANUP_TIMEOUT": "1s",
    "HYPERACTOR_STOP_ACTOR_TIMEOUT": "1s",
    "HYPERACTOR_REMOTE_STOP_GRACE_PERIOD": "1s",
    "HYPERACTOR_MESH_TERMINATE_TIMEOUT": "1s",
    "HYPERACTOR_PROCESS_EXIT_TIMEOUT": "1s",
    # how long a process may take to come up: 30 s are too few where many start on a busy machine
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "90s",
}.items():
    os.environ.setdefault(_key, _value)

import monarch.actor as monarch_actor  # noqa: E402
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError  # noqa: E402
from monarch._src.actor import config as monarch_config  # noqa: E402
from monarch.actor import (  # noqa: E402
    Actor,
    ActorError,
    Channel,
    HostMesh,
    MeshFailure,
    ProcMesh,
    ValueMesh,
    attach_to_workers,
    concurrent_endpoint,
    current_rank,
    current_size,
    run_worker_loop_forever,
    shutdown_context,
    this_host,
    this_proc,
)

# Monarch puts its name of the actor before every line, once for each handler; forge's own format has a name.
monarch_config.prefix_python_logs_with_actor = False

__all__ = [
    "Actor",
    "ActorError",
    "Channel",
    "HostMesh",
    "MeshFailure",
    "ProcMesh",
    "SupervisionError",
    "ValueMesh",
    "attach_to_workers",
    "concurrent_endpoint",
    "current_rank",
    "current_size",
    "leave",
    "monarch_actor",
    "run_worker_loop_forever",
    "this_host",
    "this_proc",
]


_LEAVE_S = 3.0


def leave() -> None:
    """Ends Monarch in this process, for good: nothing can be started afterwards.

    It would end by itself with the process, but gives its children only a second then. It waits as long as it
    may for a host that was lost.
    """
    with contextlib.suppress(TimeoutError):
        shutdown_context(host_timeout=_LEAVE_S).get(timeout=2 * _LEAVE_S)
