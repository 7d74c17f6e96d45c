"""What every group must be: rules about completions and rewards that need no memory."""

import math
from collections.abc import Sequence

import torch

from forge.data_models import Completion
from forge.rl.checks.finding import Finding

MAX_LOGPROB = 1e-4
"""Above 0 by rounding."""


def check_logprobs(names: Sequence[str], completions: Sequence[Completion]) -> Finding | None:
    """The first token without a log-probability, or with one that is not finite or above 0."""
    rule = "every token has a log-probability, finite and not above 0"
    fix = "look at the generator: its weights may hold NaN, or a processor of logits change what is sampled"
    for name, c in zip(names, completions, strict=True):
        found = None if c.logprobs is None else len(c.logprobs)
        if found != len(c.token_ids):
            seen = f"episode {name} has {len(c.token_ids)} tokens and {found or 'no'} log-probabilities"
            return Finding("logprobs", (name,), rule, seen, fix)
    logprobs = torch.cat([c.logprobs for c in completions])
    sound = (logprobs <= MAX_LOGPROB) & (logprobs > -math.inf)  # NaN is neither
    if bool(sound.all()):
        return None
    place, first = int((~sound).nonzero()[0]), 0
    while place >= len(completions[first].token_ids):
        place -= len(completions[first].token_ids)
        first += 1
    value = float(completions[first].logprobs[place])
    seen = f"token {place} of episode {names[first]} has {value:.4g}"
    return Finding("logprobs", (names[first],), rule, seen, fix)


def check_ends(
    names: Sequence[str], completions: Sequence[Completion], max_tokens: int, seq_len: int | None
) -> Finding | None:
    """The first completion that is empty, or stands without an end."""
    for name, c in zip(names, completions, strict=True):
        size = len(c.token_ids)
        most = max_tokens if seq_len is None or c.prompt_ids is None else seq_len - len(c.prompt_ids)
        most = min(max_tokens, most)
        if size == 0:
            seen = f"episode {name} has none"
        elif c.stop_reason not in ("stop", "length"):
            seen = f"episode {name} ends after {size} with stop_reason {c.stop_reason!r}"
        elif c.stop_reason == "length" and size < most:
            seen = f"episode {name} was cut after {size} of {most}"
        else:
            continue
        rule = "a completion has tokens, and ends with an end token or at max_tokens"
        fix = "look for requests that are aborted, and at grpo.max_tokens and generator.engine"
        return Finding("completions", (name,), rule, seen, fix)
    return None


def check_rewards(
    names: Sequence[str], rewards: Sequence[float], low: float | None, high: float | None
) -> Finding | None:
    """The first reward that is not finite, or outside [low, high]; None: no bound."""
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    for name, reward in zip(names, rewards, strict=True):
        if math.isfinite(reward) and low <= reward <= high:
            continue
        return Finding(
            "reward_range",
            (name,),
            f"rewards are finite, and lie in [{low:g}, {high:g}] (checks.reward_min, reward_max)",
            f"that of episode {name} is {reward:g}",
            "correct the reward function, or the range",
        )
    return None
