"""Weights in a Hugging Face folder: strict reading into a sharded model, writing back."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from forge.data.assets import INDEX, SINGLE, weight_files
from forge.errors import AssetError

MAX_FILE_BYTES = 5 * 10**9
"""Of an exported file: what the writer holds in memory."""
TIED = ("lm_head.weight", "model.embed_tokens.weight")
# What a model folder holds beside its weights: config, tokenizer, chat template, generation defaults.
COMPANIONS = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")


def load_weights(names: Mapping[str, Tensor], folder: Path) -> None:
    """Fills tensors, by their Hugging Face names, from the folder's safetensors files.

    Each process reads the files itself and keeps its shards. Raises AssetError naming the first tensor that
    is missing, unknown or of another shape.
    """
    found: set[str] = set()
    for name, tensor in _stored(folder):
        if name.endswith("rotary_emb.inv_freq"):  # written by old versions of transformers, computed today
            continue
        if name == TIED[0] and name not in names:
            _check_tied(folder, tensor)
            continue
        if name not in names:
            raise AssetError(f"{folder} holds {name}, which a model of its config.json does not have")
        _copy(tensor, names[name], name, folder)
        found.add(name)
    missing = sorted(set(names) - found)
    if missing:
        raise AssetError(
            f"{folder} lacks {len(missing)} weights that its config.json asks for, first {missing[0]}"
        )


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to write a model to; its files then take the place of those of an earlier export.

    Whenever a kill comes, the folder holds one of the two, whole: no weights are overwritten that the other
    needs, and what names the new ones comes last.
    """
    new = folder / ".partial"  # inside, since the folder may be a file system of its own
    if new.exists():
        shutil.rmtree(new)
    new.mkdir(parents=True)
    yield new
    old = _named_in(folder) | {SINGLE}
    for path in folder.glob("*.safetensors"):
        if path.name not in old:  # left by a kill
            path.unlink()
    _give_free_names(new, old)
    kept = _named_in(new) or {SINGLE}
    for path in sorted(new.iterdir(), key=lambda path: path.name in (SINGLE, INDEX)):
        os.replace(path, folder / path.name)
    new.rmdir()
    if SINGLE in kept:
        (folder / INDEX).unlink(missing_ok=True)
    for name in sorted(old - kept):
        (folder / name).unlink(missing_ok=True)


def _give_free_names(new: Path, taken: set[str]) -> None:
    """Where a file in `new` would overwrite a taken one, all are called model-b-... instead of model-..."""
    names = _named_in(new)
    if not names & taken:
        return
    free = {name: name.replace("model-", "model-b-", 1) for name in names}
    for name, other in free.items():
        os.replace(new / name, new / other)
    index = json.loads((new / INDEX).read_text())
    index["weight_map"] = {tensor: free[name] for tensor, name in index["weight_map"].items()}
    _write_json(index, new / INDEX)


def _named_in(folder: Path) -> set[str]:
    """The files that the folder's index names; none where it has no index."""
    path = folder / INDEX
    return set(json.loads(path.read_text())["weight_map"].values()) if path.is_file() else set()


def _write_json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def save_weights(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, max_bytes: int = MAX_FILE_BYTES
) -> None:
    """Whole tensors by Hugging Face names -> safetensors files, and the index when they are several.

    No more than one file's tensors are held at a time. One tensor that is larger has a file of its own.
    """
    file_of: list[list[str]] = []
    waiting: dict[str, Tensor] = {}
    total = 0

    def write() -> None:
        save_file(waiting, folder / f"{len(file_of)}.part", metadata={"format": "pt"})
        file_of.append(list(waiting))
        waiting.clear()

    for name, tensor in tensors:
        if waiting and sum(t.nbytes for t in waiting.values()) + tensor.nbytes > max_bytes:
            write()
        waiting[name] = tensor.cpu().contiguous()
        total += tensor.nbytes
    write()
    if len(file_of) == 1:
        os.replace(folder / "0.part", folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(file_of):
        file = f"model-{i + 1:05d}-of-{len(file_of):05d}.safetensors"
        os.replace(folder / f"{i}.part", folder / file)
        weight_map |= dict.fromkeys(names, file)
    _write_json({"metadata": {"total_size": total}, "weight_map": weight_map}, folder / INDEX)


def save_companions(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copies what stands beside the weights in `source`; config.json says which dtype they have now."""
    for path in sorted({path for pattern in COMPANIONS for path in source.glob(pattern)}):
        if path.name != INDEX:
            shutil.copy(path, folder / path.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    _write_json(config, folder / "config.json")


def save_adapter(tensors: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    """Writes a folder that PEFT loads, in place of an earlier one: whole, or not there."""
    new = folder.with_name(f"{folder.name}.partial")
    for path in (new, folder):
        if path.exists():
            shutil.rmtree(path)
    new.mkdir(parents=True)
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, new / "adapter_model.safetensors", metadata={"format": "pt"})
    _write_json(dict(config), new / "adapter_config.json")
    os.replace(new, folder)


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  safe_open is no mapping
                yield name, stored.get_tensor(name)


def _check_tied(folder: Path, head: Tensor) -> None:
    """A tied model may store its head once more, as long as it is the same."""
    embedding = next((tensor for name, tensor in _stored(folder) if name == TIED[1]), None)
    if embedding is not None and not torch.equal(head, embedding):
        raise AssetError(f"{folder}: config.json ties {TIED[0]} to {TIED[1]}, but the two differ")


def _copy(stored: Tensor, target: Tensor, name: str, folder: Path) -> None:
    if stored.shape != target.shape:
        raise AssetError(
            f"{name} in {folder} has shape {list(stored.shape)}, config.json asks for {list(target.shape)}"
        )
    fill(target, stored)


@torch.no_grad()
def fill(target: Tensor, whole: Tensor) -> None:
    """Copies a whole tensor into one of the same shape, or the part of it that this process holds."""
    if isinstance(target, DTensor):
        # every process has the whole tensor: it cuts its shard without asking another
        whole = whole.to(target.to_local().device, target.dtype)
        shard = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(shard.to_local())
    else:
        target.copy_(whole)


def whole(tensor: Tensor) -> Tensor:
    """A tensor or all shards of one (a collective: every process must call it), detached."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
