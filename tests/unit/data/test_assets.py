"""Models by name: what is found, what is made once, and what is said when something is missing."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge.data.assets import cache_folder, check_model_folder, fetch
from forge.errors import AssetError
from tests.unit.data.tiny_gguf import write_tiny_gguf


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A model folder that a test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


@pytest.fixture
def gguf_file(tiny_llama: Path, tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", tiny_llama)


def test_a_local_folder_is_itself(model: Path) -> None:
    assert fetch(str(model)) == fetch(model) == model


def test_a_gguf_file_becomes_a_folder_once(gguf_file: Path, own_cache: Path) -> None:
    folder = fetch(gguf_file)
    check_model_folder(folder)
    assert folder.is_relative_to(own_cache)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert fetch(str(gguf_file)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_a_changed_gguf_file_is_another_model(gguf_file: Path) -> None:
    folder = fetch(gguf_file)
    os.utime(gguf_file, ns=(0, 0))
    assert fetch(gguf_file) != folder


FOUR_PROCESSES = """
import multiprocessing, sys, gguf, torch, transformers
from forge.data.assets import fetch

def ask(gate):
    gate.wait()  # all at once
    folder = fetch(sys.argv[1])
    print(folder, (folder / "model.safetensors").stat().st_ino, flush=True)

fork = multiprocessing.get_context("fork")  # what they import, the slow part, is imported once
gate = fork.Barrier(4)
processes = [fork.Process(target=ask, args=(gate,)) for _ in range(4)]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(any(process.exitcode for process in processes))
"""


def test_four_processes_that_ask_at_once_share_one_conversion(gguf_file: Path, own_cache: Path) -> None:
    command = [sys.executable, "-c", FOUR_PROCESSES, str(gguf_file)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        while process.poll() is None:
            for folder in (own_cache / "models").glob("tiny-" + "[0-9a-f]" * 12):
                check_model_folder(folder)  # whoever sees the folder sees all of it
            time.sleep(0.001)
        assert process.stdout is not None
        answers = process.stdout.read().splitlines()
    assert process.returncode == 0
    assert len(answers) == 4 and len(set(answers)) == 1  # one folder, and the weights were written once
    assert [path.suffix for path in (own_cache / "models").iterdir() if path.is_dir()] == [""]


def test_what_a_killed_conversion_left_is_replaced(gguf_file: Path) -> None:
    folder = fetch(gguf_file)
    part = Path(f"{folder}.part")
    shutil.rmtree(folder)
    part.mkdir()
    (part / "model.safetensors").write_text("half of it")
    assert fetch(gguf_file) == folder
    check_model_folder(folder)
    assert not part.exists() and (folder / "model.safetensors").stat().st_size > 1000


def test_a_conversion_that_fails_leaves_nothing_and_says_so(tmp_path: Path, own_cache: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(200))
    for _ in range(2):
        with pytest.raises(AssetError, match=r"can't read the GGUF file .*broken\.gguf") as caught:
            fetch(broken)
        assert "\n" not in str(caught.value)
    assert not [path for path in (own_cache / "models").iterdir() if path.is_dir()]


def test_a_gguf_file_inside_a_package_is_found_without_importing_it(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "my_models"
    (package / "files").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    shutil.copy(gguf_file, package / "files" / "tiny.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    check_model_folder(fetch("pkg://my_models/files/tiny.gguf"))
    with pytest.raises(AssetError, match=r"has no other\.gguf: its GGUF files are \['files/tiny\.gguf'\]"):
        fetch("pkg://my_models/other.gguf")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("pkg://no_such_package/model.gguf", "pip install no-such-package"),
        ("pkg://json/model.gguf", "has no model.gguf: its GGUF files are none"),
        ("pkg://model.gguf", "not pkg://package/path/file.gguf"),
        ("pkg://json/model.bin", "not pkg://package/path/file.gguf"),
        ("./no/such/folder", "no model at ./no/such/folder"),
        ("/no/such/folder", "no model at /no/such/folder"),
        ("no/such.gguf", "no model at no/such.gguf"),
        ("just-a-name", "no model at just-a-name"),
        ("hf://just-a-name", "write hf://Org/Name"),
        ("hf://Org/Name/more", "write hf://Org/Name"),
        (__file__, "is a file but not a .gguf one"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_clear_line(uri: str, message: str) -> None:
    with pytest.raises(AssetError) as caught:
        fetch(uri)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("uri", ["hf://Org/Name", "Org/Name"])
def test_a_hub_model_that_can_not_be_reached_is_one_clear_line(uri: str, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom forge.data.assets import fetch\nfrom forge.errors import AssetError\n"
        "try: fetch(sys.argv[1])\nexcept AssetError as error: print(error)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program, uri], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("can't get hf://Org/Name (") and done.stdout.count("\n") == 1, done.stderr


def test_a_hub_model_in_the_local_hub_cache_is_found(tiny_llama: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--Org--Name" / "snapshots" / "abc"
    shutil.copytree(tiny_llama, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    program = "import sys\nfrom forge.data.assets import fetch\nprint(fetch(sys.argv[1]))"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    for uri in ("hf://Org/Name", "Org/Name", "hf://Org/Name@main"):
        done = subprocess.run(
            [sys.executable, "-c", program, uri], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.strip() == str(snapshot), done.stderr


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no .safetensors weights"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_an_incomplete_folder_names_what_is_missing_and_where(
    model: Path, missing: str, message: str
) -> None:
    (model / missing).unlink()
    for check in (check_model_folder, fetch):
        with pytest.raises(AssetError) as caught:
            check(model)
        assert message in str(caught.value) and str(model) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_weights_of_another_kind_are_named(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(AssetError, match=r"only pytorch_model\.bin"):
        check_model_folder(model)


def test_a_shard_that_the_index_names_must_be_there(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(AssetError, match=r"lacks 1 weight files, first model-00002-of-00002\.safetensors"):
        check_model_folder(model)


@pytest.mark.parametrize(("content", "message"), [("{oops", "is not JSON"), ("[1]", "holds a list")])
def test_a_broken_config_is_named(model: Path, content: str, message: str) -> None:
    (model / "config.json").write_text(content)
    with pytest.raises(AssetError, match=message):
        check_model_folder(model)


@pytest.mark.parametrize("tokenizer", [["tokenizer.model"], ["vocab.json", "merges.txt"]])
def test_other_kinds_of_tokenizer_count(model: Path, tokenizer: list[str]) -> None:
    (model / "tokenizer.json").unlink()
    for name in tokenizer:
        (model / name).touch()
    check_model_folder(model)


def test_the_cache_is_in_the_home_folder_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "forge"


def test_importing_assets_and_rewards_loads_nothing_heavy() -> None:
    program = (
        "import sys, forge.data.assets, forge.data.rewards, forge.data.tokenizer, forge.data.sources\n"
        "heavy = {'torch', 'transformers', 'vllm', 'monarch', 'datasets', 'torchtitan'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
