"""[1-2] A question from the dataset and an answer of the generator."""

from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from torch import Tensor


class Sample(TypedDict):
    """One row of a dataset, ready to be asked."""

    request: str  # prompt text, rendered by the model's chat template
    target: str  # what a reward function compares the answer with
    question: NotRequired[str]  # as the dataset has it, for people to read


Prompt = str | list[int]
"""What a generator takes: text, or token ids."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer. P prompt tokens, T sampled tokens.

    `logprobs` are natural logs under the distribution the tokens were really drawn from, that is after
    `temperature`. `token_versions` [T] holds the policy version each token was sampled under;
    `generator_version` is the oldest of them, which is what staleness is measured by.
    """

    text: str
    token_ids: Tensor  # [T] int64
    logprobs: Tensor  # [T] float32
    metadata: dict[str, Any] = field(default_factory=dict)
    prompt_ids: Tensor | None = None  # [P] int64
    generator_version: int = 0
    stop_reason: str | None = None  # "stop" (an end token was sampled) or "length"
    temperature: float = 1.0
    token_versions: Tensor | None = None  # [T] int64
