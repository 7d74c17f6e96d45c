"""[4-5] What the trainer reads and what it answers."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TrainInputs:
    """What the model reads: B rows of L tokens. A row is one prompt followed by its completions.

    The prompt stands once a row and every completion continues from it: a token attends to earlier tokens
    of its own segment and to the prompt (segment 0), and `positions` of each completion start at the
    prompt's length.
    """

    input_ids: Tensor  # [B, L] int64
    positions: Tensor  # [B, L] int64
    segment_ids: Tensor  # [B, L] int64: 0 the prompt, k >= 1 the k-th completion of the row, -1 padding


@dataclass(frozen=True, slots=True)
class TrainTargets:
    """What the loss reads: N completions, right-padded to T tokens.

    `source_ids` says where in TrainInputs, as row * L + column, the token stands whose output predicts the
    target; for the first token of a completion that is the last token of its prompt.
    """

    source_ids: Tensor  # [N, T] int64, 0 where masked
    target_ids: Tensor  # [N, T] int64
    loss_mask: Tensor  # [N, T] bool
    advantages: Tensor  # [N] float32, or [N, T] for one per token
    generator_logprobs: Tensor  # [N, T] float32, 0 where masked
    ref_logprobs: Tensor | None = None  # [N, T] float32, 0 where masked
    # [N, T] float32: of the trainer's policy when the batch's first update began; None: this is the first
    proximal_logprobs: Tensor | None = None
    temperature: float = 1.0  # that of the sampling; the trainer divides its logits by it
    episode_ids: list[str] = field(default_factory=list)  # [N]
    policy_versions: list[int] = field(default_factory=list)  # [N] the oldest that sampled a token of each


@dataclass(frozen=True, slots=True)
class TextTrainBatch:
    """Plain right-padded text, for training without groups (all [batch, seq_len]).

    `target_ids[b, t]` is the token that follows `input_ids[b, : t + 1]`; `target_weights` scales each
    target's term of the loss (it is handed to the loss as the advantages).
    """

    input_ids: Tensor  # int64
    target_ids: Tensor  # int64
    target_mask: Tensor  # bool: which targets count
    target_weights: Tensor  # float32
    episode_ids: list[str] = field(default_factory=list)  # [batch], names for messages about a text


@dataclass(frozen=True, slots=True)
class ForwardBackwardResult:
    """One pass over a batch: the loss, averaged over all ranks' data, and named facts beside it."""

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a trainer has come, over all restarts."""

    num_steps: int  # optimizer steps
    state: dict[str, Any] = field(default_factory=dict)  # that its caller gave with the last of them
