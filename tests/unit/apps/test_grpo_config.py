"""The keys of the GRPO app, the YAML files it ships, and where a run would be placed."""

from pathlib import Path

import pytest

from apps.grpo.config import DEFAULT_CONFIG, SHORTHANDS, GRPOConfig, load_config
from apps.grpo.machines import placement
from apps.grpo.rollouts import without_trainer
from forge.config import describe
from forge.errors import ConfigError

FOLDER = DEFAULT_CONFIG.parent
MODELS = ["smollm2_135m", "qwen3_1_7b", "qwen3_8b", "llama3_8b", "distill_qwen3_1_7b"]
# query heads, key-value heads, hidden size, vocabulary: config.json of each model on the hub
SHAPES = {
    "smollm2_135m": (9, 3, 576, 49152),
    "qwen3_1_7b": (16, 8, 2048, 151936),
    "qwen3_8b": (32, 8, 4096, 151936),
    "llama3_8b": (32, 8, 4096, 128256),
    "distill_qwen3_1_7b": (16, 8, 2048, 151936),
}
ON_A_CPU = ["smollm2_135m", "distill_smollm2_135m", "gsm8k_smollm2"]


def config_of(*argv: str, model: str = "smollm2_135m") -> GRPOConfig:
    return load_config(["--config", str(FOLDER / f"{model}.yaml"), *argv]).config


def error_of(*argv: str, model: str = "smollm2_135m") -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(*argv, model=model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("model", MODELS)
def test_every_shipped_file_extends_base_and_loads(model: str) -> None:
    text = (FOLDER / f"{model}.yaml").read_text()
    assert "extends: base.yaml" in text
    assert config_of(model=model).model


def test_files_that_lack_something_load_once_it_is_given() -> None:
    gsm8k = config_of("--dataset.path", "data", model="gsm8k_smollm2")
    assert (gsm8k.dataset.path, gsm8k.dataset.split, gsm8k.evaluation.split) == ("data", "train", "test")
    assert config_of("--teacher", "model", model="distill_smollm2_135m").teacher == "model"
    assert "set it with --dataset.path" in error_of(model="gsm8k_smollm2")


def test_no_shipped_file_was_forgotten() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted({"base", *MODELS, *ON_A_CPU})


@pytest.mark.parametrize("model", MODELS)
def test_tensor_parallelism_divides_the_shapes_of_the_real_model(model: str) -> None:
    config = config_of(model=model)
    for size in (config.services.generator.procs, config.parallelism.tensor_parallel_degree):
        assert [dim % size for dim in SHAPES[model]] == [0, 0, 0, 0]


@pytest.mark.parametrize("model", sorted({*MODELS} - {*ON_A_CPU}))
def test_a_gpu_file_gives_each_model_its_gpus(model: str) -> None:
    services = config_of(model=model).services
    assert services.ref_model is not None
    assert services.generator.with_gpus and services.trainer.with_gpus and services.ref_model.with_gpus
    assert not services.reward.with_gpus


def test_the_default_run_needs_no_gpu_and_no_hub() -> None:
    config = load_config([]).config
    assert not any(service.with_gpus for service in config.services.present().values())
    assert config.model.startswith("pkg://") and config.dataset.path.startswith("reasoning_gym/")


def test_the_documented_command_line_sets_the_services() -> None:
    config = config_of("--trainer.procs", "4", "--generator.procs", "4", model="qwen3_1_7b")
    assert config.services.trainer.procs == config.services.generator.procs == 4
    assert config.data_parallel_size == 4


def test_sections_of_the_same_name_keep_their_own_keys() -> None:
    config = config_of("--generator.max_num_seqs", "3", "--dataset.split", "test", "--dataset.mesh_name", "d")
    assert config.generator.max_num_seqs == 3
    assert config.dataset.split == "test"
    assert config.services.dataset.mesh_name == "d"


def test_no_key_means_both_a_section_and_a_service() -> None:
    config = load_config([]).config
    for name in SHORTHANDS:
        section = getattr(config, name, None)
        assert section is None or not set(section.__slots__) & set(config.services.generator.__slots__)


def test_users_keys_of_the_design_are_all_accepted(tmp_path: Path) -> None:
    (tmp_path / "user.yaml").write_text("""
model: "Qwen/Qwen2.5-7B-Instruct"
dataset:  {path: "openai/gsm8k", split: "train", streaming: true}
training: {batch_size: 4, learning_rate: 1e-6, seq_len: 4096, dtype: bfloat16, gradient_accumulation_steps: 2,
           sync_interval: 1, entropy_coef: 0.0}
grpo:     {n_samples: 8, clip_low: 0.2, clip_high: 0.28, beta: 0.1, temperature: 0.7}
parallelism: {tensor_parallel_degree: 2, pipeline_parallel_degree: 1, data_parallel_shard_degree: 2}
services: {generator: {procs: 1, num_replicas: 1, with_gpus: true}, trainer: {procs: 4, with_gpus: true},
           ref_model: {with_gpus: false}}
""")
    config = load_config(["--config", str(tmp_path / "user.yaml")]).config
    assert config.data_parallel_size == 2
    assert config.training.learning_rate == 1e-6
    assert config.loss == {
        "name": "grpo",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "beta": 0.1,
        "entropy_coef": 0.0,
    }


@pytest.mark.parametrize(
    ("argv", "procs", "expected"),
    [
        ([], 6, 6),
        (["--parallelism.tensor_parallel_degree", "2"], 6, 3),
        (["--parallelism.data_parallel_replicate_degree", "2"], 4, 4),  # 2 copies x what is left: 2
        (
            ["--parallelism.data_parallel_shard_degree", "2", "--parallelism.tensor_parallel_degree", "3"],
            6,
            2,
        ),
        (["--trainer.hosts", "2"], 3, 6),
    ],
)
def test_data_parallel_size_is_what_the_other_degrees_leave(
    argv: list[str], procs: int, expected: int
) -> None:
    config = config_of("--trainer.procs", str(procs), "--training.batch_size", "12", *argv)
    assert config.data_parallel_size == expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["--trainer.procs", "4", "--parallelism.data_parallel_shard_degree", "3"],
            "services.trainer has 4 processes, but parallelism wants "
            "tensor 1 x pipeline 1 x context 1 x replicate 1 x shard 3 = 3: set procs to 3",
        ),
        (
            ["--trainer.procs", "3", "--parallelism.tensor_parallel_degree", "2"],
            "services.trainer has 3 processes, but parallelism wants tensor 2 x pipeline 1 x context 1 x "
            "replicate 1 x shard -1 (what is left), a multiple of 2",
        ),
        (
            ["--trainer.procs", "2", "--training.gradient_accumulation_steps", "3"],
            "training.batch_size 8 can't be split evenly: 2 data-parallel ranks x "
            "training.gradient_accumulation_steps 3 = 6; make it a multiple of 6, for example 12",
        ),
        (["--training.min_lr_factor", "2"], "training.min_lr_factor must lie in [0, 1], got 2.0"),
        (["--training.max_tokens_per_pass", "0"], "training.max_tokens_per_pass must be at least 1, got 0"),
        (
            ["--parallelism.tensor_parallel_degree", "0"],
            "parallelism.tensor_parallel_degree must be at least 1",
        ),
        (["--services.ref_model", "null"], "but there is no reference model: add services.ref_model"),
        (
            ["--grpo.max_tokens", "128"],
            "grpo.max_tokens 128 leaves no room for a prompt in training.seq_len 128",
        ),
        (["--training.sync_interval", "4"], "max_policy_age 1 is too small for training.sync_interval 4"),
        (["--max_policy_age", "-1"], "max_policy_age must be at least 0, or auto, got -1"),
        (
            ["--max_policy_age", "auto", "--staleness.limit", "1", "--training.sync_interval", "2"],
            "staleness.limit 1 is below training.sync_interval 2",
        ),
        (
            ["--max_policy_age", "auto", "--loss", "sft"],
            "logprob_gap of each batch, and loss SFTLoss has no whole_batch_metrics that tells them",
        ),
        (["--buffer.reuse", "3"], "buffer.reuse 3 needs episodes of up to 2 steps ago"),
        (["--training.minibatches", "3"], "training.batch_size 8 can't be split into training.minibatches 3"),
        (
            ["--training.minibatches", "4", "--trainer.procs", "4"],
            "training.batch_size / training.minibatches 2 can't be split evenly: 4 data-parallel ranks",
        ),
        (["--rollout-only", "--replay", "x"], "rollout_only trains nothing and replay generates nothing"),
        (["--resume", "--rollout-only"], "resume goes on with a run that generates and trains"),
        (["--evaluation.temperature", "0"], "evaluation.n_samples is 4, but at temperature 0 all of them"),
        (["--evaluation.max_tokens", "128"], "evaluation.max_tokens 128 leaves no room for a prompt"),
        (["--grpo.n_samples", "1"], "grpo.n_samples must be at least 2, got 1"),
        (["--grpo.temperature", "0"], "grpo.temperature must be above 0, got 0.0"),
        (["--grpo.clip_low", "1.5"], "loss.clip_low must lie in [0, 1], got 1.5"),
        (
            ["--grpo.agg_type", "mean"],
            "loss.agg_type must be one of fixed_horizon, token_mean, sequence_mean",
        ),
        (["--training.learning_rate", "0"], "training.learning_rate must be above 0, got 0.0"),
        (
            ["--training.dtype", "float16"],
            "training.dtype must be one of auto, bfloat16, float32, got 'float16'",
        ),
        (["--generator.procs", "0"], "services.generator.procs must be at least 1, got 0"),
        (["--trainer.num_replicas", "2"], "services.trainer.num_replicas must be 1, got 2"),
        (["--replay_buffer.procs", "2"], "services.replay_buffer must be one process, got 2"),
        (
            ["--generator.gpu_memory_utilization", "1.5"],
            "generator.gpu_memory_utilization must lie in (0, 1]",
        ),
        (["--weights.hosts", "1"], "weights.hosts 1 leaves none of 1 hosts for the services"),
        (["--generator.in_flight", "drop"], "generator.in_flight must be one of recompute, keep, finish"),
        (["--generator.kv_cache_memory_gb", "0"], "generator.kv_cache_memory_gb must be above 0"),
        (
            ["--generator.engine.dtype", "float16"],
            "generator.engine.dtype has its own key: set training.dtype",
        ),
        (["--dataset.path", "openai/gsm8k"], "dataset.options are arguments of a reasoning-gym task"),
        (["--chaos.kill", "generater"], "chaos.kill names 'generater'; there are advantages, dataset, gen"),
        (["--chaos.every_s", "0"], "chaos.every_s must be above 0"),
        (["--stall_timeout_s", "-1"], "stall_timeout_s must be above 0"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--model", "null"], "model must be text"),
    ],
)
def test_an_impossible_value_names_its_key_and_the_arithmetic(argv: list[str], expected: str) -> None:
    assert expected in error_of(*argv)


def test_without_a_reference_model_beta_may_be_zero() -> None:
    config = config_of("--services.ref_model", "null", "--grpo.beta", "0")
    assert config.services.ref_model is None
    assert "ref_model" not in config.services.present()


def test_the_resolved_configuration_loads_to_itself(tmp_path: Path) -> None:
    config = config_of(model="qwen3_8b")
    (tmp_path / "resolved.yaml").write_text(describe(config))
    assert load_config(["--config", str(tmp_path / "resolved.yaml")]).config == config


def test_placement_lists_every_replica_and_counts_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    table = placement(config_of("--generator.num_replicas", "3", model="qwen3_8b"))
    rows = {tuple(line.split()[:2]): line.split() for line in table.splitlines()}
    assert {index for name, index in rows if name == "generator"} == {"0", "1", "2"}
    gpus = [gpu for row in rows.values() for gpu in row[4].split(",") if row[2:4] == ["this", "host"]]
    assert sorted(int(gpu) for gpu in gpus if gpu != "none") == list(range(11))
    assert len(rows["trainer", "0"][4].split(",")) == 4 and rows["reward", "0"][4] == "none"
    assert "11 GPUs, 15 processes; this machine has 2 GPUs" in table and table.endswith(": 9 missing here")


def test_placement_leaves_out_an_absent_reference_and_says_when_no_gpu_is_used() -> None:
    table = placement(config_of("--services.ref_model", "null", "--grpo.beta", "0"))
    assert "ref_model" not in table and "missing" not in table
    assert table.splitlines()[-1].startswith("no GPUs, 6 processes; this machine has")


def test_placement_shows_what_the_run_starts() -> None:
    table = placement(config_of("--rollout_only", "true", model="qwen3_8b"))
    assert "\ntrainer " not in table and "\ngenerator " in table
    table = placement(config_of("--replay", "episodes", model="qwen3_8b"))
    assert "\ntrainer " in table and "\ngenerator " not in table and "\nreward " not in table


def test_placement_on_emulated_hosts_names_them_and_refuses_what_has_no_host() -> None:
    hosts = ("--launcher.name", "local", "--launcher.num_hosts", "2", "--launcher.gpus_per_host", "4")
    table = placement(config_of(*hosts, model="qwen3_8b"))
    assert {word for word in table.split() if word.startswith("host") and word[-1].isdigit()} == {
        "host0",
        "host1",
    }
    assert "2 hosts have 4 + 4 GPUs" in table
    assert "host1" not in placement(config_of(*hosts, "--weights.hosts", "1"))
    with pytest.raises(ConfigError, match="generator wants 3 hosts for one replica, and there are 2"):
        placement(config_of(*hosts, "--generator.hosts", "3", model="qwen3_8b"))
    assert "set launcher.name to local" in error_of("--launcher.num_hosts", "2")


def test_rollouts_alone_measure_all_questions_and_need_nothing_that_is_the_trainers() -> None:
    ages = ("max_policy_age=3", "training.sync_interval=4")
    config = config_of("rollout_only=true", "steps=1", *ages, "loss=dapo", "ref_model=null")
    assert config.algorithm().recipe.dynamic_sampling
    alone = without_trainer(config)
    assert not alone.algorithm().recipe.dynamic_sampling
    assert alone.age_limit == 1 and not alone.services.trainer.with_gpus
