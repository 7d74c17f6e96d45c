"""Weights written to a Hugging Face folder, file by file."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


UNLIMITED = 10**6
ONE, TWO, THREE, SEVEN = 10_000, 1600, 1200, 400  # bytes of a file that make so many


@pytest.mark.parametrize("before", [ONE, TWO, SEVEN])
@pytest.mark.parametrize("after", [ONE, THREE, SEVEN])
def test_whenever_a_kill_comes_the_folder_holds_one_export_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    def export(value: float, max_bytes: int) -> None:
        with replacing(tmp_path) as new:
            save_weights([(f"layer{i}", torch.full((100,), value)) for i in range(7)], new, max_bytes)

    def stored() -> set[float]:
        weights = {f"layer{i}": torch.zeros(100) for i in range(7)}
        load_weights(weights, tmp_path)  # every one of them, or raises
        return {value for weight in weights.values() for value in weight.tolist()}

    def killed_before(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def change(*args: Any, **kwargs: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            original(*args, **kwargs)

        monkeypatch.setattr(owner, name, change)

    killed_before(os, "replace")
    killed_before(Path, "unlink")
    value, left = 0.0, UNLIMITED
    for num_changes in range(100):
        export(value, before)
        assert stored() == {value}
        left = num_changes
        try:
            export(value + 1, after)
        except Killed:
            assert stored() in ({value}, {value + 1})
            value, left = value + 2, UNLIMITED  # the next export tidies up
            continue
        assert stored() == {value + 1}
        assert num_changes >= 2
        names = {path.name for path in tmp_path.iterdir()}
        assert len(names) == (1 if after == ONE else 1 + len({*index_of(tmp_path).values()}))
        return
    raise AssertionError("always killed")


def index_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


class Killed(BaseException):
    pass
