"""The keys of the questions: those that are trained on, and those that are held out."""

from dataclasses import dataclass
from typing import Any

from apps.sections import at_least
from forge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """Where prompts and their targets come from."""

    path: str = "openai/gsm8k"  # on the Hugging Face hub; or a .jsonl or .parquet file; or reasoning_gym/TASK
    name: str | None = None  # subset of a hub dataset ("main" for gsm8k)
    split: str = "train"  # split of a hub dataset
    streaming: bool = False  # read a hub dataset while training instead of downloading it first
    prompt_column: str = "question"  # column that holds the prompt
    target_column: str = "answer"  # column that holds what the reward compares with
    system_prompt: str | None = None  # put before every prompt by the chat template
    options: dict[str, Any] | None = None  # arguments of a reasoning-gym task

    def __post_init__(self) -> None:
        _check_options(self.path, self.options)


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """Questions that are never trained on, asked again and again: what the policy of the moment can do."""

    every: int = 0  # steps between two evaluations, beside those before the first and after the last; 0: none
    size: int = 64  # questions, chosen by the seed
    n_samples: int = 4  # answers to each: avg@n and pass@k for k up to n
    temperature: float = 1.0  # of the sampling; 0: the likeliest answer, for which one sample is enough
    max_tokens: int | None = None  # longest answer, in tokens; null: grpo.max_tokens
    path: str | None = None  # data of their own, as dataset.path; null: held out of the training data
    name: str | None = None  # subset of that
    split: str | None = None  # split of that; with path null: another split of the training data
    options: dict[str, Any] | None = None  # arguments of that reasoning-gym task

    def __post_init__(self) -> None:
        at_least(self, 0, "every", "temperature")
        at_least(self, 1, "size", "n_samples")
        if self.max_tokens is not None:
            at_least(self, 1, "max_tokens")
        if self.path is not None:
            _check_options(self.path, self.options)
        if self.temperature == 0 and self.n_samples > 1:
            raise ConfigError(
                f"n_samples is {self.n_samples}, but at temperature 0 all of them are the same: set it to 1, "
                "or the temperature above 0"
            )


def _check_options(path: str, options: dict[str, Any] | None) -> None:
    if options and not path.startswith("reasoning_gym/"):
        raise ConfigError(
            f"options are arguments of a reasoning-gym task, but the path is {path!r}: set them to null, or "
            "choose a path like reasoning_gym/chain_sum"
        )
