"""The teacher of a run that distils: what goes together with it, and whether it can judge its student."""

from pathlib import Path
from typing import TYPE_CHECKING

from apps.grpo.algorithm_config import AlgorithmConfig
from forge.data.tokenizer import load_tokenizer
from forge.errors import ConfigError

if TYPE_CHECKING:
    from apps.grpo.algorithm import Algorithm

OF_REWARDS = ("baseline", "normalize", "dynamic_sampling", "overlong_cache")
"""Keys of the algorithm that say how to learn from rewards."""


def check_teaching(options: AlgorithmConfig, algorithm: "Algorithm", has_reference: bool) -> None:
    """Raises ConfigError for what a run with a teacher can't have, or would not heed."""
    from forge.rl.loss import GSPOLoss  # takes a second: torch

    loss, beta = algorithm.loss, algorithm.beta
    if not has_reference:
        raise ConfigError(
            "teacher is set, but not where it runs: add services.ref_model, which takes its place"
        )
    if beta > 0:
        raise ConfigError(
            f"teacher takes the place of the reference model, but the loss has a beta of {beta} for the KL "
            "towards that: set loss to reinforce, or grpo.beta to 0"
        )
    if isinstance(loss, GSPOLoss) and loss.level == "sequence":
        raise ConfigError(
            "teacher judges every token, but the loss is GSPO, whose ratio of a whole answer gives "
            "them all one gradient: set loss to gspo_token"
        )
    for name in OF_REWARDS:
        if value := getattr(options, name):
            raise ConfigError(
                f"grpo.{name} is {value}, but with a teacher nothing is learnt from rewards: leave it out"
            )


def check_teacher(teacher: Path, student: Path) -> None:
    """Raises ConfigError unless every token of the student is the same token to the teacher.

    teacher, student: model folders. The teacher may know more tokens than the student.
    """
    from forge.actors.trainer.hf_config import read_hf_config  # takes seconds: transformers

    known, used = load_tokenizer(teacher).get_vocab(), load_tokenizer(student).get_vocab()
    others = sorted((number, token) for token, number in used.items() if known.get(token) != number)
    if others:
        number, token = others[0]
        raise ConfigError(
            f"teacher {teacher} does not share the vocabulary of {student}: {len(others)} of its {len(used)} "
            f"tokens are others there, the first is {number} ({token!r}); choose a teacher of the same family"
        )
    size, needed = (read_hf_config(folder).vocab_size for folder in (teacher, student))
    if size < needed:
        raise ConfigError(
            f"teacher {teacher} has embeddings of {size} tokens, and {student} may sample {needed}: choose a "
            "teacher with as many"
        )
