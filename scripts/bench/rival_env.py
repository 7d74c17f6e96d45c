"""Environments of the rivals' own (.bench/NAME), made on first use and when other packages are asked for."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRL = "1.16.0"


def rival_python(name: str, packages: Sequence[str], overrides: Sequence[str] = ()) -> Path:
    """The Python of .bench/NAME, where `packages` are installed; `overrides` replace what they ask for.

    What was asked for is kept in the environment, which is made anew when it is not the same.
    """
    folder = ROOT / ".bench" / name
    python, kept = folder / "bin/python", folder / "packages.txt"
    asked = "\n".join([*packages, "overrides:", *overrides])
    if kept.is_file() and kept.read_text() == asked:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"installing {' '.join(packages)} into {folder.relative_to(ROOT)}", flush=True)
    uv = ROOT / ".venv/bin/uv"
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")
    env = {**os.environ, "UV_FIND_LINKS": links.replace(" ", ",")}  # uv does not read pip's settings
    try:
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder], check=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(overrides))
            file.flush()
            install = [uv, "pip", "install", "-q", "--python", python, "--override", file.name]
            subprocess.run([*install, *packages], env=env, check=True)
        kept.write_text(asked)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # half an environment would pass for a whole one
        raise
    return python


def trl_python() -> Path:
    """The Python that has TRL, with the same torch as ours."""
    torch = f"torch=={version('torch')}"
    return rival_python("trl", [f"trl=={TRL}", torch], [torch])
