"""The folders of runs: a new one, an earlier one to go on with, and one run at a time in each."""

import errno
import fcntl
import logging
import os
import re
import time
from itertools import count
from pathlib import Path
from typing import IO

from forge.errors import ConfigError

logger = logging.getLogger(__name__)

LAST = "last"
"""As the run to go on with: the newest with a checkpoint, else the newest; no replay."""

CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
"""What was asked for, and a folder of checkpoints."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_DONE_ANEW = re.compile(r"^replay: (?!null$)|^rollout_only: true$", re.MULTILINE)  # as `describe` writes it
_STEP = re.compile(r"step-\d+")


def new_folder(output_dir: Path) -> Path:
    """A folder named by the time, which no other run has."""
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in count(1):
        folder = output_dir / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("numbers do not end")


def earlier_folder(resume: str, output_dir: Path) -> Path:
    """The folder of the run that is to go on. Raises ConfigError when there is none."""
    if resume != LAST:
        if not (Path(resume) / CONFIG).is_file():
            raise ConfigError(f"resume is {resume!r}, which is no folder of a run (it has no {CONFIG})")
        return Path(resume)
    runs = sorted(path.parent for path in output_dir.glob(f"*/{CONFIG}") if not _is_done_anew(path))
    if not runs:
        raise ConfigError(f"resume is {LAST!r}, but {output_dir} holds no run to go on with: leave it out")
    return ([run for run in runs if has_checkpoint(run)] or runs)[-1]


def _is_done_anew(config: Path) -> bool:
    """Whether it is that of a replay, or of rollouts alone, which have no state to go on with."""
    return _DONE_ANEW.search(config.read_text(errors="replace")) is not None


def has_checkpoint(folder: Path, step: int | None = None) -> bool:
    """Whether a run has a complete checkpoint: of this step, or of any."""
    found = (path.parent.name for path in (folder / CHECKPOINTS).glob("step-*/.metadata"))
    return any(_STEP.fullmatch(name) and step in (None, int(name.removeprefix("step-"))) for name in found)


def lock(folder: Path) -> IO[str]:
    """Keeps the folder for this process until what is returned is closed, or the process is gone.

    Raises ConfigError while another run has it.
    """
    file = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read()
        file.close()
        raise ConfigError(
            f"the run in {folder} still goes on, in process {owner}: stop it first, or start a new run"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("%s can't be locked (%s): see to it that no other run uses it", folder, error)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
