"""Shared fixtures: one tiny model of each family a test run."""

import os
from pathlib import Path

import pytest

# Many tests wait for the loss of a host, which is noticed by its silence. Read when Monarch is imported.
os.environ.setdefault("HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE", "5s")
os.environ.setdefault("HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE", "5s")

from tests.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny_llama", "llama", tied=True)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny_qwen3", "qwen3", tied=False)
