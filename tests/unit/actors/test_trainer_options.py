"""What a trainer can be told, and what it says to mistakes."""

import pytest

from forge.actors.trainer.options import ParallelismOptions, model_options, trainer_options
from forge.errors import ConfigError


def test_a_model_is_a_uri_or_a_section() -> None:
    assert model_options("hf://a/b", {}, {}) == model_options({"hf_assets_path": "hf://a/b"}, {}, {})


def test_defaults_hold_where_nothing_is_said() -> None:
    options = trainer_options("x", optimizer={"lr": 1e-5, "betas": (0.9, 0.95)}, training={"seq_len": 128})
    assert (options.optimizer.lr, options.optimizer.betas, options.training.dtype) == (
        1e-5,
        [0.9, 0.95],
        "bfloat16",
    )


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("optimizer", {"learning_rate": 1e-5}, "unknown key optimizer.learning_rate"),
        ("optimizer", {"lr": -1.0}, "lr must not be negative"),
        ("optimizer", {"name": "Adagrad"}, "optimizer.name must be one of AdamW, Adam"),
        ("training", {"dtype": "float16"}, "training.dtype must be one of bfloat16, float32"),
        ("training", {"gradient_accumulation_step": 2}, "did you mean training.gradient_accumulation_steps"),
        ("training", {"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ("parallelism", {"pipeline_parallel_degree": 2}, "pipeline_parallel_degree is 2"),
    ],
)
def test_mistakes_are_named(section: str, values: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer_options("x", **{section: values})


def test_degrees_must_multiply_to_the_processes() -> None:
    ParallelismOptions(tensor_parallel_degree=2).check(4)
    ParallelismOptions(tensor_parallel_degree=2, data_parallel_shard_degree=2).check(4)
    with pytest.raises(ConfigError, match="asks for 2 x 3 processes .* the mesh has 4"):
        ParallelismOptions(tensor_parallel_degree=2, data_parallel_shard_degree=3).check(4)
    with pytest.raises(ConfigError, match="asks for 3 processes"):
        ParallelismOptions(tensor_parallel_degree=3).check(4)
