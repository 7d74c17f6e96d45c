"""EpisodeBooks: what became of every episode, as the loop sees it, whatever buffer is between."""

from collections.abc import Iterator, Sequence
from typing import Any

from forge.data_models import Completion, TrainTargets
from forge.rl.checks.finding import Finding

MAX_EPISODES = 2**16
"""That are remembered, the newest; the oldest of more is forgotten."""


class EpisodeBooks:
    """The tokens that each episode was generated with until it is trained on, and how often that was."""

    def __init__(self, max_age: int, max_uses: int) -> None:
        self._max_age, self._max_uses = max_age, max_uses
        self._num_tokens: dict[str, int] = {}
        self._uses: dict[str, int] = {}

    def generated(self, names: Sequence[str], completions: Sequence[Completion]) -> None:
        """Takes note of a group that will be trained on."""
        for name, c in zip(names, completions, strict=True):
            _put(self._num_tokens, name, len(c.token_ids))

    def sampled(self, targets: Sequence[TrainTargets], version: int) -> Iterator[Finding]:
        """Takes note of a batch for the trainer, which holds `version`; what is wrong with it, of each
        invariant the first."""
        seen: set[str] = set()
        for t in targets:
            sizes = t.loss_mask.sum(-1).tolist()
            ages = [version - v for v in t.policy_versions] or [0] * len(sizes)
            for name, size, age in zip(t.episode_ids, sizes, ages, strict=True):
                for finding in (self._check_size(name, size), self._check_age(name, age), self._use(name)):
                    if finding is not None and finding.invariant not in seen:
                        seen.add(finding.invariant)
                        yield finding
                if self._uses[name] >= self._max_uses:  # it is not to come again
                    self._num_tokens.pop(name, None)

    def _check_size(self, name: str, size: int) -> Finding | None:
        generated = self._num_tokens.get(name, size)  # unknown: it came by another way
        if size == generated:
            return None
        return Finding(
            "token_counts",
            (name,),
            "a batch has every token of its episodes, and no other",
            f"episode {name} was generated with {generated} and is to be trained with {size}",
            "look at what cuts or exchanges episodes between generator and trainer",
        )

    def _check_age(self, name: str, age: int) -> Finding | None:
        if 0 <= age <= self._max_age:
            return None
        than = "older than" if age > 0 else "newer than"
        return Finding(
            "age",
            (name,),
            f"the policy of an episode is at most {self._max_age} versions older than the trainer's "
            "(max_policy_age), and never newer",
            f"that of episode {name} is {abs(age)} versions {than} the trainer's",
            "admit rollouts through the buffer (admit), and tell it the trainer's version (sample)",
        )

    def _use(self, name: str) -> Finding | None:
        uses = self._uses.get(name, 0) + 1
        _put(self._uses, name, uses)
        if uses <= self._max_uses:
            return None
        return Finding(
            "reuse",
            (name,),
            f"an episode is trained on at most {self._max_uses} times (buffer.reuse)",
            f"episode {name} comes for the {uses}th time",
            "give every episode an id of its own, and keep to one buffer; to use them more often, raise "
            "buffer.reuse",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"num_tokens": dict(self._num_tokens), "uses": dict(self._uses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_tokens, self._uses = dict(state["num_tokens"]), dict(state["uses"])


def _put(memory: dict[str, int], name: str, value: int) -> None:
    """As the newest; forgets the oldest where there are too many."""
    memory.pop(name, None)
    memory[name] = value
    if len(memory) > MAX_EPISODES:
        del memory[next(iter(memory))]
