"""The run's folder: what outlives the processes of its actors, and goes with the run."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from forge.controller.provisioner import is_running
from forge.errors import ConfigError


def run_base() -> Path:
    """Holds one folder for each live run of this user on this host, named by the pid of its root process.

    In the system's folder for temporary files, which TMPDIR moves.
    """
    return Path(tempfile.gettempdir()) / f"forge-{os.getuid()}"


def make_run_folder() -> Path:
    """A new, empty folder for the run of this process; sweeps what runs that were killed have left."""
    base = run_base()
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"a run needs a folder for temporary files, and {base} can't be made: {error}"
        ) from None
    if base.stat().st_uid != os.getuid():
        raise ConfigError(f"{base} belongs to another user: set TMPDIR to a folder of your own")
    for old in base.iterdir():
        if old.name.isdigit() and not is_running(int(old.name)):
            shutil.rmtree(old, ignore_errors=True)
    folder = base / str(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
