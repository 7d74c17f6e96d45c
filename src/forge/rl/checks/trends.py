"""What no single group shows: nearly all completions are cut, no group has variance."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from forge.data_models import Completion
from forge.rl.checks.finding import Finding

WINDOW = 512
"""Completions that the share of cut ones is of."""


class Truncation:
    """The share of completions that are cut at their longest, over the last WINDOW."""

    def __init__(self, max_share: float, max_tokens: int) -> None:
        self._max_share, self._max_tokens = max_share, max_tokens
        self._cut: deque[bool] = deque(maxlen=WINDOW)

    def see(self, names: Sequence[str], completions: Sequence[Completion]) -> Finding | None:
        """Tells once a window."""
        cut = [c.stop_reason == "length" for c in completions]
        self._cut.extend(cut)
        share = sum(self._cut) / len(self._cut) if self._cut else 0.0
        if len(self._cut) < WINDOW or share <= self._max_share:
            return None
        self._cut.clear()
        last = tuple(name for name, is_cut in zip(names, cut, strict=True) if is_cut) or tuple(names)
        return Finding(
            "truncation",
            last,
            f"at most {self._max_share:.0%} of completions are cut at max_tokens (checks.max_truncated)",
            f"{share:.1%} of the last {WINDOW} were, at {self._max_tokens} tokens, up to episode {last[-1]}",
            "raise grpo.max_tokens, or see whether the chat template's end token is one of the engine's",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"cut": list(self._cut)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cut = deque(state["cut"], maxlen=WINDOW)


class ZeroVariance:
    """Groups in a row whose completions all earn the same: nothing is learnt from them."""

    def __init__(self, max_groups: int) -> None:
        self._max_groups = max_groups
        self._num_groups = 0

    def see(self, names: Sequence[str], rewards: Sequence[float]) -> Finding | None:
        """Tells once every `max_groups` of them."""
        if len(rewards) < 2:  # nobody to differ from
            return None
        self._num_groups = self._num_groups + 1 if max(rewards) == min(rewards) else 0
        if self._num_groups < self._max_groups:
            return None
        self._num_groups = 0
        return Finding(
            "zero_variance",
            tuple(names),
            f"one of {self._max_groups} groups in a row has rewards that differ (zero_variance_groups)",
            f"none had; the last are all {rewards[0]:g}, of episode {names[0]} and its group",
            "see whether the reward function tells answers apart, choose questions that are neither too easy "
            "nor too hard, or sample more answers to each (grpo.n_samples, grpo.temperature)",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"num_groups": self._num_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_groups = state["num_groups"]
