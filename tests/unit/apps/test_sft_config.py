"""The keys of the SFT app, the YAML files it ships, and where a run would be placed."""

import time
from pathlib import Path

import pytest

from apps.sft.config import DEFAULT_CONFIG, SHORTHANDS, SFTConfig, load_config
from apps.sft.machines import placement
from apps.sft.position import Place, place_of
from forge.app import earlier_run
from forge.config import describe
from forge.data.chat_dataset import ChatSizes
from forge.data.rows import Position
from forge.data_models import Progress
from forge.errors import ConfigError

FOLDER = DEFAULT_CONFIG.parent
MODELS = ["smollm2_135m", "qwen3_8b", "llama3_8b"]
SIZES = ChatSizes(train=798, validation=100, duplicates=0)


def config_of(*argv: str, model: str = "smollm2_135m") -> SFTConfig:
    return load_config(["--config", str(FOLDER / f"{model}.yaml"), *argv]).config


def test_every_shipped_file_extends_base_loads_and_shows_itself(tmp_path: Path) -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(["base", *MODELS])
    for model in MODELS:
        assert "extends: base.yaml" in (FOLDER / f"{model}.yaml").read_text()
        config = config_of(model=model)
        (tmp_path / "resolved.yaml").write_text(describe(config))
        assert load_config(["--config", str(tmp_path / "resolved.yaml")]).config == config


@pytest.mark.parametrize("model", ["qwen3_8b", "llama3_8b"])
def test_a_gpu_file_takes_conversations_from_the_hub_and_nine_gpus(model: str) -> None:
    config = config_of(model=model)
    assert config.dataset.path == "HuggingFaceH4/ultrachat_200k" and config.validation.split == "test_sft"
    assert config.training.batch_size % config.data_parallel_size == 0
    assert "9 GPUs, 10 processes" in placement(config)


def test_the_default_run_needs_no_gpu_and_no_hub() -> None:
    config = load_config([]).config
    assert not any(service.with_gpus for service in config.services.present().values())
    assert config.model.startswith("pkg://") and config.dataset.path.startswith("pkg://")
    assert "no GPUs, 3 processes" in placement(config)


def test_no_key_means_both_a_section_and_a_service() -> None:
    config = load_config([]).config
    for name in SHORTHANDS:
        section = getattr(config, name, None)
        assert section is None or not set(section.__slots__) & set(config.services.trainer.__slots__)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--trainer.procs", "32"], "training.batch_size 16 is less than a conversation for each of 32"),
        (["--dataset.prompt_column", "q"], "dataset.prompt_column and answer_column go together"),
        (["--dataset.targets", "first"], "dataset.targets must be one of all, last"),
        (["--training.lr_decay", "step"], "training.lr_decay must be one of constant, linear, cosine"),
        (["--training.seq_len", "0"], "training.seq_len must be at least 1"),
        (["--validation.every", "0"], "validation.every must be at least 1"),
        (["--checkpoint.keep_latest_k", "0"], "checkpoint.keep_latest_k must be at least 1"),
        (["--dataset.procs", "2"], "services.dataset must be one process, got 2"),
        (["--trainer.num_replicas", "2"], "services.trainer.num_replicas must be 1, got 2"),
        (["--chaos.kill", "reward"], "chaos.kill names 'reward'; there are dataset, generator, trainer"),
        (["--epochs", "0"], "epochs must be at least 1, got 0"),
    ],
)
def test_an_impossible_value_names_its_key_and_the_arithmetic(argv: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(*argv)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_place_in_the_data_comes_back_from_a_checkpoint_and_only_with_the_same_data() -> None:
    config = config_of()
    start = place_of(Progress(0), config, SIZES)
    assert (start.step, start.position) == (0, Position())
    later = Place(6, Position(1, 3), start.data).after(Position(1, 19))
    assert place_of(Progress(7, later.state()), config, SIZES) == later
    for other, sizes, words in (
        (config_of("--seed", "1"), SIZES, "trained with seed 0, now it is 1"),
        (config, ChatSizes(700, 100, 0), "trained with conversations 798, now it is 700"),
    ):
        with pytest.raises(ConfigError, match=words):
            place_of(Progress(7, later.state()), other, sizes)


def test_a_run_to_resume_is_found_by_its_folder_or_as_the_last(tmp_path: Path) -> None:
    out = f"output_dir={tmp_path}"
    assert earlier_run(config_of(out)) is None
    with pytest.raises(ConfigError, match="holds no run"):
        earlier_run(config_of(out, "resume=last"))
    for name in ("20260101-000000", time.strftime("%Y%m%d-%H%M%S")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    assert earlier_run(config_of(out, "resume=last")) == tmp_path / name
    assert earlier_run(config_of(out, f"resume={tmp_path / name}")) == tmp_path / name
    with pytest.raises(ConfigError, match="no folder of a run"):
        earlier_run(config_of(out, f"resume={tmp_path}"))
