"""The door to TorchStore takes the one version it was made for."""

import subprocess
import sys

OTHER_VERSION = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.9.9" if name == "torchstore" else real(name)
import forge.weights
"""


def test_another_version_of_torchstore_is_one_clear_line() -> None:
    ended = subprocess.run([sys.executable, "-c", OTHER_VERSION], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert ended.stderr.splitlines()[-1] == (
        "forge.errors.ConfigError: forge works with torchstore 0.1.2, 0.9.9 is installed: "
        "pip install torchstore==0.1.2"
    )


def test_importing_the_store_leaves_the_root_logger_alone() -> None:
    script = "import logging, forge.weights; print(logging.root.level, logging.root.handlers)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "30 []", ended.stderr
