"""[1] Questions that are held out: asked to evaluate, never trained on."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from forge.data.questions import Questions
from forge.data.rows import Position, Row, RowSource
from forge.errors import ConfigError, DatasetError


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How many questions are held out, and of which data."""

    size: int
    questions: Questions

    @classmethod
    def of(cls, given: Mapping[str, Any], training: Questions) -> Self:
        """What is asked for: `size`, and fields of Questions. Those that are missing or None are as in the
        training data; `name` and `options` are so only where the path is. Raises ConfigError."""
        known = ["size", *(field.name for field in fields(Questions))]
        if unknown := sorted(given.keys() - known):
            raise ConfigError(f"held_out has no key {unknown[0]!r}; it has {known}")
        if not isinstance(size := given.get("size"), int) or size < 1:
            raise ConfigError(f"held_out.size must be a number of questions, at least 1, got {size}")
        asked = {key: value for key, value in given.items() if value is not None and key != "size"}
        if asked.get("path", training.path) != training.path:
            training = replace(training, name=None, options=None)
        return cls(size, replace(training, **asked))

    def choose(self, seed: int) -> dict[str, Row]:
        """The first rows in the order of the seed that ask different questions, by their words.

        Raises DatasetError where there are less than `size`, and as `Questions.open` does.
        """
        chosen: dict[str, Row] = {}
        for row in self.questions.open(seed).rows(Position()):
            chosen.setdefault(self.questions.words(row), row)
            if len(chosen) == self.size:
                return chosen
        raise DatasetError(
            f"{self.size} questions are to be held out, and {self.questions.path}, split "
            f"{self.questions.split}, has {len(chosen)} different ones: hold out less"
        )

    def out_of(self, training: Questions, seed: int) -> tuple[list[Row], RowSource]:
        """The held-out rows, and those of the training data that ask none of their questions.

        Raises DatasetError where none are left.
        """
        chosen = self.choose(seed)
        left = training.open(seed).where(lambda row: training.words(row) not in chosen)
        if next(left.rows(Position()), None) is None:
            raise DatasetError(
                f"all questions of {training.path}, split {training.split}, are among the {self.size} "
                "held-out ones, and none is left to train on: hold out less"
            )
        return list(chosen.values()), left
