"""[3] Scores for an answer: callables `(prompt, response, target) -> float`.

Each is a small picklable object, so that it travels to the actors that grade.
"""

from dataclasses import dataclass
from fractions import Fraction

from forge.data.answers import as_number, find_answer, last_number
from forge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MathReward:
    """1.0 when the response's final answer equals the target as a number, else 0.0; nothing in between.

    The final answer is the last number in what `find_answer` returns: the last `\\boxed{...}`, else
    `<answer>...</answer>`, else what follows `####`, else the whole response. `tolerance` is the largest
    absolute difference that still counts as equal.

    Raises ConfigError for a target that is not a number: every response would score 0.
    """

    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < float("inf"):
            raise ConfigError(f"MathReward's tolerance must be finite and not negative, got {self.tolerance}")

    def __call__(self, prompt: str, response: str, target: str) -> float:
        wanted = as_number(find_answer(target))
        if wanted is None:
            raise ConfigError(
                f"MathReward needs a target that is a number, got {target!r}: choose another "
                "target_column of the dataset, or compare text with ExactMatchReward"
            )
        given = last_number(find_answer(response))
        return float(given is not None and abs(given - wanted) <= Fraction(self.tolerance))


@dataclass(frozen=True, slots=True)
class ExactMatchReward:
    """1.0 when the response, without surrounding white space, is the target letter by letter, else 0.0."""

    def __call__(self, prompt: str, response: str, target: str) -> float:
        return float(response.strip() == target.strip())


@dataclass(frozen=True, slots=True)
class ThinkingReward:
    """How well a response keeps to `<think>reasoning</think>answer`, whatever it says.

    1.0: exactly one block, not empty, with nothing before it and an answer after it;
    0.5: exactly one block, not empty, with text before it or no answer after it;
    0.0: no block, an empty, unclosed or repeated one.

    Where the prompt already ends with the opening tag, as some chat templates make it, that tag counts.
    """

    tag: str = "think"

    def __call__(self, prompt: str, response: str, target: str) -> float:
        opening, closing = f"<{self.tag}>", f"</{self.tag}>"
        if prompt.rstrip().endswith(opening):
            response = opening + response
        if response.count(opening) != 1 or response.count(closing) != 1:
            return 0.0
        before, _, rest = response.partition(opening)
        reasoning, closed, answer = rest.partition(closing)
        if not closed or not reasoning.strip():
            return 0.0
        return 1.0 if answer.strip() and not before.strip() else 0.5
