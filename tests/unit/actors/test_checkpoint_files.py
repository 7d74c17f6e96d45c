"""Weights written to a Hugging Face folder, file by file."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from forge.actors.trainer.checkpoint_files import INDEX, load_weights, replacing, save_weights

MAX_BYTES = 60_000


def test_large_models_are_written_in_several_files_that_transformers_loads(
    tiny_llama: Path, tmp_path: Path
) -> None:
    weights = load_file(tiny_llama / "model.safetensors")
    largest = max(tensor.nbytes for tensor in weights.values())
    AutoConfig.from_pretrained(tiny_llama).save_pretrained(tmp_path)
    with replacing(tmp_path) as new:
        save_weights(weights.items(), new, MAX_BYTES)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(path.stat().st_size < max(largest, MAX_BYTES) + 2_000 for path in files)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert set(index["weight_map"]) == set(weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    read = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    load_weights(read, tmp_path)
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())

    with replacing(tmp_path) as new:  # one file takes the place of several
        save_weights(weights.items(), new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_an_export_that_fails_leaves_the_one_before_it(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield "first", torch.ones(100)
        raise OSError("no room")

    with replacing(tmp_path) as new:
        save_weights([("first", torch.zeros(100))], new)
    with pytest.raises(OSError, match="no room"), replacing(tmp_path) as new:
        save_weights(failing(), new)
    assert load_file(tmp_path / "model.safetensors")["first"].sum() == 0
