"""What a trainer can be told, and what it says to mistakes."""

import pytest
from transformers import LlamaConfig

from forge.actors.trainer.lora_options import LoRAOptions
from forge.actors.trainer.options import ParallelismOptions, model_options, trainer_options
from forge.errors import ConfigError


def test_a_model_is_a_uri_or_a_section() -> None:
    assert model_options("hf://a/b", {}, {}) == model_options({"hf_assets_path": "hf://a/b"}, {}, {})


def test_defaults_hold_where_nothing_is_said() -> None:
    options = trainer_options("x", optimizer={"lr": 1e-5, "betas": (0.9, 0.95)}, training={"seq_len": 128})
    assert (options.optimizer.lr, options.optimizer.betas, options.training.dtype) == (
        1e-5,
        [0.9, 0.95],
        "auto",
    )


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("optimizer", {"learning_rate": 1e-5}, "unknown key optimizer.learning_rate"),
        ("optimizer", {"lr": -1.0}, "lr must not be negative"),
        ("optimizer", {"name": "Adagrad"}, "optimizer.name must be one of AdamW, Adam"),
        ("training", {"dtype": "float16"}, "training.dtype must be one of auto, bfloat16, float32"),
        ("training", {"gradient_accumulation_step": 2}, "did you mean training.gradient_accumulation_steps"),
        ("training", {"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ("training", {"max_tokens_per_pass": 0}, "max_tokens_per_pass must be at least 1"),
        ("training", {"lora": {"rank": 0}}, "training.lora.rank must be at least 1, got 0"),
        ("training", {"lora": {"alpha": 0.0}}, "training.lora.alpha must be positive"),
        ("training", {"lora": {"r": 8}}, "unknown key training.lora.r"),
        ("training", {"lora": {"target_modules": []}}, "training.lora.target_modules is empty"),
        (
            "training",
            {"lora": {"target_modules": ["q_proj", "lm_head"]}},
            "training.lora.target_modules must be some of q_proj, .*, down_proj, got 'lm_head'",
        ),
        (
            "lr_scheduler",
            {"decay": "linear", "warmup_steps": 1_000_000},
            "decay needs steps behind the warm-up",
        ),
        ("lr_scheduler", {"min_lr_factor": 2.0}, "min_lr_factor must be between 0 and 1"),
        ("parallelism", {"context_parallel_degree": 0}, "context_parallel_degree must be at least 1"),
        ("parallelism", {"pipeline_parallel_schedule": "ZB"}, "must be one of 1F1B, Interleaved1F1B, GPipe"),
    ],
)
def test_mistakes_are_named(section: str, values: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer_options("x", **{section: values})


def test_adapters_are_on_all_layers_unless_some_are_named() -> None:
    def lora(**values: object) -> LoRAOptions:
        training = trainer_options("x", training={"lora": values}).training
        assert training.lora is not None
        return training.lora

    assert (lora().rank, lora().alpha, lora().scale, len(lora().layers)) == (8, 16.0, 2.0, 7)
    assert lora(target_modules=["v_proj", "q_proj"]).layers == ("q_proj", "v_proj")
    assert lora(rank=4, alpha=6).scale == 1.5
    assert trainer_options("x", training={"lora": None}).training.lora is None


def test_degrees_must_multiply_to_the_processes() -> None:
    tensor = ParallelismOptions(tensor_parallel_degree=2)
    assert tensor.shard_degree(4) == 2
    assert ParallelismOptions(tensor_parallel_degree=2, data_parallel_shard_degree=2).shard_degree(4) == 2
    mixed = ParallelismOptions(pipeline_parallel_degree=2, context_parallel_degree=3)
    assert mixed.dp_size(12) == 2
    replicated = ParallelismOptions(data_parallel_replicate_degree=2)
    assert (replicated.shard_degree(8), replicated.dp_size(8)) == (4, 8)
    with pytest.raises(ConfigError, match=r"services\.x has 4 processes, .* x shard 3 = 6: set procs to 6"):
        ParallelismOptions(tensor_parallel_degree=2, data_parallel_shard_degree=3).shard_degree(
            4, "services.x"
        )
    with pytest.raises(ConfigError, match="wants tensor 3 x .* a multiple of 3"):
        ParallelismOptions(tensor_parallel_degree=3).check(4)


LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("parallelism", "model", "says"),
    [
        ({"tensor_parallel_degree": 4}, {}, "num_key_value_heads, but 2 is no multiple of 4"),
        ({"tensor_parallel_degree": 2}, {"vocab_size": 511}, "vocab_size, but 511 is no multiple of 2"),
        ({"pipeline_parallel_degree": 2}, {"tie_word_embeddings": True}, "must be 1 for a model with tied"),
        ({"pipeline_parallel_degree": 5}, {}, "1F1B makes 5 stages, but the model has only 4 layers"),
        (
            {"pipeline_parallel_degree": 3, "pipeline_parallel_schedule": "Interleaved1F1B"},
            {},
            "Interleaved1F1B makes 6 stages, but the model has only 4 layers",
        ),
    ],
)
def test_a_model_that_can_not_be_cut_like_that_is_refused(parallelism: dict, model: dict, says: str) -> None:
    config = LlamaConfig(**{**LAYERS, "tie_word_embeddings": False, **model})
    with pytest.raises(ConfigError, match=says):
        ParallelismOptions(**parallelism).check_model(config)
    ParallelismOptions(tensor_parallel_degree=1, pipeline_parallel_degree=1).check_model(config)


def test_offload_needs_shards() -> None:
    options = trainer_options("x", training={"cpu_offload": True})
    options.check(2)
    with pytest.raises(ConfigError, match="cpu_offload moves the shards of several processes"):
        options.check(1)
