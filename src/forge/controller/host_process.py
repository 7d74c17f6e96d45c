"""The process that is one emulated host; it ends when the root process does, whatever ends that.

python -m forge.controller.host_process ADDRESS PID_OF_ROOT
"""

import os
import signal
import sys
import threading
import time

from forge.controller._monarch import run_worker_loop_forever
from forge.controller.launcher import kill_session

_LOOK_S = 0.5


def watch(root: int) -> None:
    """Ends this host, with all its processes, once the process that started it is gone."""
    while os.getppid() == root:
        time.sleep(_LOOK_S)
    kill_session(os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    address, root = sys.argv[1:]
    threading.Thread(target=watch, args=(int(root),), daemon=True, name="watch").start()
    run_worker_loop_forever(address=address, ca="trust_all_connections")
