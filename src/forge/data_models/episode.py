"""[3] A graded completion."""

from dataclasses import dataclass

from torch import Tensor

from forge.data_models.completion import Completion


@dataclass(frozen=True, slots=True)
class Episode:
    """One completion with its reward, its advantage over its group, and the reference's opinion of it.

    `advantage` is one for all tokens, or [T] float32 for one per token. `ref_logprobs` [T] is None where no
    reference model is used.
    """

    episode_id: str
    group_id: str  # completions of the same prompt, sampled together
    completion: Completion
    target: str
    reward: float
    advantage: float | Tensor
    ref_logprobs: Tensor | None = None

    @property
    def policy_version(self) -> int:
        """The oldest policy version that sampled a token of this episode."""
        return self.completion.generator_version
