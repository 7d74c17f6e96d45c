"""Names in /dev/shm under which the ranks of an engine on a CPU find each other's memory when they start.

They are removed as soon as all ranks have mapped what they name, so that a kill leaves nothing. One that
comes before that leaves names behind, which the next start sweeps.
"""

import os
import re
import time
from pathlib import Path
from typing import Any

_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"\d+-.*-cpushm_(\d+)$")  # vLLM's: the port by which the ranks have met, ..., the rank
_IN_USE_S = 300.0  # ranks map each other's memory within seconds


def unlink_names(rank: int, queue: Any) -> None:
    """This rank's names of a started engine; queue: vLLM's message queue of the ranks, if there is one."""
    if queue is not None and queue.buffer.is_creator:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False  # or it would unlink it once more
    for path in _FOLDER.iterdir():
        if path.name.startswith(f"{os.environ['VLLM_DIST_IDENT']}-") and path.name.endswith(f"cpushm_{rank}"):
            path.unlink()


def sweep_names(folder: Path = _FOLDER) -> None:
    """Removes the names that killed engines of this user left: old ones, of memory that nobody maps."""
    old = [path for path in folder.iterdir() if _NAME.match(path.name) and _is_old(path)]
    if not old:
        return
    mapped = _mapped_files()
    for path in old:
        if str(path) not in mapped:
            path.unlink(missing_ok=True)


def _is_old(path: Path) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:  # swept by another engine that starts
        return False
    return status.st_uid == os.geteuid() and time.time() - status.st_mtime > _IN_USE_S


def _mapped_files() -> set[str]:
    """What the processes of this user map."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except (OSError, UnicodeDecodeError):  # it has ended, or is another user's
            continue
        found.update(fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6)
    return found
