"""Checks: the invariants of a run, looked at where its loop passes by."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from forge.controller import ActorHandle
from forge.data_models import Completion, TrainInputs, TrainTargets
from forge.rl.checks.agreement import check_gradient, check_ratio, check_reference, is_of
from forge.rl.checks.books import EpisodeBooks
from forge.rl.checks.drift import RewardDrift
from forge.rl.checks.finding import Finding, name_all
from forge.rl.checks.options import CheckOptions
from forge.rl.checks.samples import check_ends, check_logprobs, check_rewards
from forge.rl.checks.trends import Truncation, ZeroVariance
from forge.rl.checks.verdicts import Verdicts


class Checks:
    """Warns, replaces a group or ends the run where an invariant does not hold; the options say which.

        if not checks.group(number, completions, rewards): ...          # ask the next question instead
        await checks.start(trainer, inputs, targets)                    # before the first update
        checks.batch(targets, step)
        for update in await updates(trainer, batches):
            checks.step(update.targets, update.result.metrics)

    max_tokens, seq_len: longest completion, and longest with its prompt; max_policy_age: versions that an
    episode may be older than the trainer; reuse: how often it may be trained on; dtype: of all computation;
    teacher: the reference is another model, which is learnt from instead of the rewards.
    """

    def __init__(
        self,
        options: CheckOptions,
        *,
        max_tokens: int,
        seq_len: int | None = None,
        max_policy_age: int,
        reuse: int = 1,
        dtype: str = "bfloat16",
        teacher: bool = False,
    ) -> None:
        self._options, self._limits = options, options.limits(dtype)
        self._max_tokens, self._seq_len, self._teacher = max_tokens, seq_len, teacher
        self._verdicts = Verdicts(options)
        self._books = EpisodeBooks(max_policy_age, reuse)
        self._truncation = Truncation(options.max_truncated, max_tokens)
        self._zero_variance = ZeroVariance(options.zero_variance_groups)
        self._drift = RewardDrift()
        self._step = 0  # whose batch was sampled last
        self._is_updated = False  # since then

    def group(self, number: int | str, completions: Sequence[Completion], rewards: Sequence[float]) -> bool:
        """Whether a group is fit to be trained on; False: ask another question in its place.

        Its episodes go by NUMBER/0, NUMBER/1, ... To be called once it is graded: what it lets through can be
        handed to reference, advantages and trainer. InvariantBroken where the run ends.
        """
        names = [f"{number}/{i}" for i in range(len(completions))]
        for finding in self._unfit(names, completions, rewards):
            if self._verdicts.of(finding):
                self._verdicts.rejected(finding)
                return False
        self._verdicts.accepted()
        self._books.generated(names, completions)
        for finding in self._trends(names, completions, rewards):
            self._verdicts.of(finding)
        return True

    async def start(
        self,
        trainer: ActorHandle,
        inputs: Sequence[TrainInputs],
        targets: Sequence[TrainTargets],
        version: int = 0,
    ) -> None:
        """Before the first update, with the batch it will be of: one pass over it, and two over some rows.

        version: the trainer's; above 0 where a run goes on, and is no longer its reference. Nothing of the
        trainer changes. InvariantBroken where the run ends.
        """
        is_reference = self._wants("reference_kl") and not self._teacher and version == 0
        if self._wants("ratio") or is_reference:
            logprobs = await trainer.logprobs.route(inputs, targets)
            if self._wants("ratio"):
                self._tell(check_ratio(targets, logprobs, version, self._limits.logprob_gap))
            if is_reference:
                self._tell(check_reference(targets, logprobs, self._limits.reference_kl))
        if self._wants("gradient_scale"):
            self._tell(await check_gradient(trainer, inputs, targets, self._limits.gradient_error))

    def batch(self, targets: Sequence[TrainTargets], step: int) -> None:
        """A batch as it was sampled for a step, all of its parts, before it is trained on.

        The trainer holds version step - 1. InvariantBroken where the run ends.
        """
        self._step, self._is_updated = step, False
        for finding in self._books.sampled(targets, step - 1):
            if self._wants(finding.invariant):
                self._tell(finding)

    def step(self, targets: Sequence[TrainTargets], metrics: dict[str, float]) -> None:
        """An update: every rank's targets, and what the trainer answered.

        The ratio is that of the batch's first update, later ones have moved the policy themselves; with a
        proximal policy it is that one's. InvariantBroken where the run ends.
        """
        if self._wants("token_counts") and "num_tokens" in metrics:  # not when the update is skipped
            self._tell(self._check_num_tokens(targets, metrics["num_tokens"]))
        if self._wants("ratio"):
            self._tell(self._check_ratio(targets, None if self._is_updated else metrics.get("logprob_gap")))
        self._is_updated = True

    def state_dict(self) -> dict[str, Any]:
        """Plain data, that a resumed run goes on from."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, EpisodeBooks | Truncation | ZeroVariance | RewardDrift]:
        return {
            "books": self._books,
            "truncation": self._truncation,
            "zero_variance": self._zero_variance,
            "drift": self._drift,
        }

    def _wants(self, invariant: str) -> bool:
        return self._verdicts.wants(invariant)

    def _tell(self, finding: Finding | None) -> None:
        if finding is not None:
            self._verdicts.of(finding)

    def _unfit(
        self, names: Sequence[str], completions: Sequence[Completion], rewards: Sequence[float]
    ) -> Iterator[Finding]:
        options = self._options
        rules: dict[str, Callable[[], Finding | None]] = {
            "logprobs": lambda: check_logprobs(names, completions),
            "completions": lambda: check_ends(names, completions, self._max_tokens, self._seq_len),
            "reward_range": lambda: check_rewards(names, rewards, options.reward_min, options.reward_max),
        }
        for invariant, rule in rules.items():
            if self._wants(invariant) and (finding := rule()) is not None:
                yield finding

    def _trends(
        self, names: Sequence[str], completions: Sequence[Completion], rewards: Sequence[float]
    ) -> Iterator[Finding]:
        version = min(c.generator_version for c in completions)
        rules: dict[str, Callable[[], Finding | None]] = {
            "truncation": lambda: self._truncation.see(names, completions),
            "zero_variance": lambda: None if self._teacher else self._zero_variance.see(names, rewards),
            "reward_drift": lambda: self._drift.see(names[0], rewards, version),
        }
        for invariant, rule in rules.items():
            if self._wants(invariant) and (finding := rule()) is not None:
                yield finding

    def _check_num_tokens(self, targets: Sequence[TrainTargets], trained: float) -> Finding | None:
        expected = sum(int(t.loss_mask.sum()) for t in targets)
        if trained == expected:
            return None
        names = _names(targets)
        return Finding(
            "token_counts",
            names,
            "the trainer trains on every token of its batch",
            f"step {self._step} counted {trained:.0f} of {expected} tokens of {name_all(names)}",
            "look for rows that are dropped or repeated between ranks and passes",
        )

    def _check_ratio(self, targets: Sequence[TrainTargets], gap: float | None) -> Finding | None:
        limit, version = self._limits.logprob_gap, self._step - 1
        proximal = [t.proximal_logprobs for t in targets if t.proximal_logprobs is not None]
        if len(proximal) == len(targets):
            return check_ratio(targets, proximal, version, limit)
        on_policy = all(bool(is_of(t, version).all()) for t in targets)
        if gap is None or not on_policy or gap <= limit:
            return None
        names = _names(targets)
        return Finding(
            "ratio",
            names,
            f"trainer and generator with the same weights differ by less than {limit:g} nats a token "
            "(checks.max_logprob_gap)",
            f"they differ by {gap:.3g} on average over the batch of step {self._step} with {name_all(names)}",
            "the generator's weights are not the trainer's: see logprob_gap/mean and weights.canary; "
            f"`forge replay --step {self._step}` shows the numbers of every token",
        )


def _names(targets: Sequence[TrainTargets]) -> tuple[str, ...]:
    return tuple(name for t in targets for name in t.episode_ids)
