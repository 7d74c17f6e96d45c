"""The keys of the SFT app, the YAML files it ships, and where a run would be placed."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from apps.sft.config import DEFAULT_CONFIG, SHORTHANDS, SFTConfig, load_config
from apps.sft.machines import check_warmup, placement
from apps.sft.main import is_over
from apps.sft.position import Place, place_of
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
def test_a_gpu_file_takes_conversations_from_the_hub_and_fits_a_host_of_eight(model: str) -> None:
    config = config_of(model=model)
    assert config.dataset.path == "HuggingFaceH4/ultrachat_200k" and config.validation.split == "test_sft"
    assert config.training.batch_size % config.data_parallel_size == 0
    assert "5 GPUs, 6 processes" in placement(config)


def test_the_default_run_needs_no_gpu_and_no_hub() -> None:
    config = load_config([]).config
    assert not any(service.with_gpus for service in config.present().values())
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
        (["--loss", "dapo"], "loss 'dapo' compares the policy with the one that sampled its data"),
        (["--loss", "sfd"], "did you mean sft?"),
        (["--loss.weight", "2"], "loss sft has no argument weight"),
        (["--training.lora.rank", "0"], "training.lora.rank must be at least 1, got 0"),
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
        (config_of("training.batch_size=8"), SIZES, "trained with training.batch_size 16, now it is 8"),
        (config_of("model=other"), SIZES, "trained with model 'pkg://"),
    ):
        with pytest.raises(ConfigError, match=words):
            place_of(Progress(7, later.state()), other, sizes)


def test_a_warm_up_must_leave_steps_to_a_decay() -> None:
    training = config_of("training.warmup_steps=25", "training.lr_decay=cosine").training
    with pytest.raises(ConfigError, match="warmup_steps 25 is not below the run's 25 steps: lower it"):
        check_warmup(training, 25)
    check_warmup(training, 26)


def test_no_generator_starts_where_no_question_is_asked() -> None:
    assert "generator" in config_of().present()
    for nothing in ("validation.size=0", "validation.samples=0"):
        assert "generator" not in config_of(nothing).present()


def test_a_model_that_its_processes_cannot_share_is_refused_before_any_starts(tiny_qwen3: Path) -> None:
    config = config_of(f"model={tiny_qwen3}", "trainer.procs=3", "parallelism.tensor_parallel_degree=3")
    with pytest.raises(ConfigError, match="tensor_parallel_degree must divide the model's"):
        placement(config)


def test_epochs_end_a_run_whose_conversations_were_passed_over() -> None:
    def place(step: int, epoch: int, index: int) -> Place:
        return Place(step, Position(epoch, index), {})

    machines = SimpleNamespace(num_steps=20, end=Position(1, 50))
    cases = [
        (place(9, 1, 49), False),
        (place(9, 1, 50), True),
        (place(9, 2, 3), True),
        (place(20, 0, 9), True),
    ]
    for at, over in cases:
        assert is_over(machines, at) == over  # pyright: ignore[reportArgumentType]
    by_steps = SimpleNamespace(num_steps=20, end=None)
    assert not is_over(by_steps, place(19, 7, 0))  # pyright: ignore[reportArgumentType]
