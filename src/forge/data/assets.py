"""[1] From the name of a model to a local folder with its weights, config and tokenizer."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

from filelock import FileLock

from forge.errors import AssetError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Of a model folder: all its weights, or the names of the files that hold them."""

_FORMS = "a folder, a .gguf file, pkg://package/file.gguf, or hf://Org/Name"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
# Enough to build a tokenizer: one of these sets of files.
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt"]
# The same once more, and what would make vLLM look for it: Mistral's own formats.
_NOT_FROM_HUB = ["*/*", "consolidated*", "params.json", "tekken.json"]
_GGUF_RECIPE = 1  # part of the cache key: raise it when `dequantise` writes something else


def fetch(uri: str | Path) -> Path:
    """A local folder with safetensors, config.json and tokenizer for a model named by a URI.

    `hf://Org/Name`, `Org/Name` (with `@revision`): downloaded from Hugging Face once;
    a folder: itself;
    a `.gguf` file, or `pkg://package/path/file.gguf` inside an installed Python package: dequantised to
    bfloat16 once and kept under `cache_folder()`.

    Safe to call from several processes at once: one does the work, the others wait for it. Raises AssetError
    when the model can't be found or the folder is incomplete.
    """
    folder = _locate(str(uri))
    check_model_folder(folder)
    return folder


def cache_folder() -> Path:
    """Where dequantised models are kept: $FORGE_CACHE, else ~/.cache/forge."""
    return Path(os.environ.get("FORGE_CACHE") or "~/.cache/forge").expanduser()


def check_model_folder(folder: str | Path) -> None:
    """Raises AssetError, naming what is missing and where, unless transformers could load this folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise AssetError(f"no model folder at {folder}: give {_FORMS}")
    if not (folder / "config.json").is_file():
        raise AssetError(
            f"model folder {folder} has no config.json: give the folder that save_pretrained wrote"
        )
    _read_json(folder / "config.json")
    weight_files(folder)
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS):
        raise AssetError(
            f"model folder {folder} has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json and "
            "merges.txt): save it there with tokenizer.save_pretrained"
        )


def weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights: those that the index names, else model.safetensors, else all.

    Others hold the same weights once more, by other names, as Mistral's consolidated.safetensors does. Raises
    AssetError where there are none, or one is missing.
    """
    if (folder / INDEX).is_file():
        shards = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise AssetError(f"{folder / INDEX} has no weight_map: fetch the model again")
        files = [folder / name for name in sorted(set(shards.values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise AssetError(
                f"model folder {folder} lacks {len(missing)} weight files, first {missing[0]}: fetch them"
            )
        return files
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in folder.glob(pattern))
    found = f" (only {others[0]})" if others else ""
    raise AssetError(
        f"model folder {folder} has no .safetensors weights{found}: write them with model.save_pretrained"
    )


def _locate(uri: str) -> Path:
    if uri.startswith("hf://"):
        return _download(uri.removeprefix("hf://"))
    if uri.startswith("pkg://"):
        file = package_path(uri, ".gguf")
        if file.is_dir():
            raise AssetError(f"{uri} is a folder: name a file in it, pkg://package/path/file.gguf")
        return _from_gguf(file)
    path = Path(uri).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise AssetError(f"model {uri} is a file but not a .gguf one: give {_FORMS}")
        return _from_gguf(path.resolve())
    if _HUB_NAME.fullmatch(uri) and uri[0] != "." and path.suffix != ".gguf":
        return _download(uri)
    raise AssetError(f"no model at {uri}: give {_FORMS}")


def _download(name: str) -> Path:
    """The snapshot of a model on Hugging Face: only the files of its top folder that loading needs."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    repo, _, revision = name.partition("@")
    if not _HUB_NAME.fullmatch(name):
        raise AssetError(
            f"hf://{name} is not a model's name: write hf://Org/Name, for example hf://Qwen/Qwen3-1.7B"
        )
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision or None,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_NOT_FROM_HUB,
            )
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise AssetError(
            f"can't get hf://{name} ({type(error).__name__}: {reason}): check the name and the connection, "
            "log in with `hf auth login` if it is gated, or give a local folder"
        ) from error


def package_path(uri: str, suffix: str) -> Path:
    """The file ending in `suffix`, or the folder, that `pkg://package/path` names. The package is not
    imported: its code may need more. Raises AssetError when it is not installed or has no such file.
    """
    package, _, inside = uri.removeprefix("pkg://").partition("/")
    if not package.isidentifier() or Path(inside).suffix not in ("", suffix):
        raise AssetError(f"{uri} is not pkg://package/path/file{suffix}, with the package's import name")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise AssetError(
            f"{uri} needs the Python package {package}, which is not installed: "
            f"pip install {package.replace('_', '-')}"
        )
    places = [Path(place) for place in spec.submodule_search_locations]
    for place in places:
        path = place / inside
        if path.is_dir() or path.is_file():
            return path
    files = sorted(
        path.relative_to(place).as_posix() for place in places for path in place.rglob(f"*{suffix}")
    )
    shown = f"{files[:20]} and {len(files) - 20} more" if len(files) > 20 else files or "none"
    kind = suffix[1:].upper()
    raise AssetError(f"the Python package {package} has no {inside}: its {kind} files are {shown}")


def _from_gguf(gguf: Path) -> Path:
    """The dequantised model, made on the first call and found on the next ones."""
    stat = gguf.stat()
    identity = f"{gguf.name} {stat.st_size} {stat.st_mtime_ns} {_GGUF_RECIPE}"
    models = cache_folder() / "models"
    folder = models / f"{gguf.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            # Renamed when complete, so that whoever sees the folder sees all of it. A killed run leaves its
            # part behind; the lock makes sure that nobody is still writing it.
            part = Path(f"{folder}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            try:
                from forge.data.dequantise import dequantise

                dequantise(gguf, part)
                check_model_folder(part)
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return folder


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise AssetError(f"{path} is not JSON ({error}): fetch the model again") from error
    if not isinstance(content, dict):
        raise AssetError(f"{path} holds a {type(content).__name__}, not an object: fetch the model again")
    return content
