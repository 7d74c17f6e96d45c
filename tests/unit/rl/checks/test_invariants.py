"""Each invariant broken by one change of a run that is sound otherwise; what is told, of which episode."""

import logging
import pickle
import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal, get_origin

import pytest
import torch
from torch import Tensor

from forge.data_models import Completion, Episode, TrainTargets
from forge.errors import InvariantBroken
from forge.observability.metrics import drain
from forge.rl.arrange import arrange
from forge.rl.checks import CheckOptions
from forge.rl.checks.verdicts import MAX_REJECTED
from tests.unit.rl.checks.runs import (
    MAX_TOKENS,
    SEQ_LEN,
    Batch,
    Group,
    Outcome,
    Spoilt,
    group_of,
    new_checks,
    run,
)

INVARIANTS = [f.name for f in fields(CheckOptions) if get_origin(f.type) is Literal]
REPLACED = ("logprobs", "completions")  # what no run can go on with
ALL_TOLD = CheckOptions(
    **{name: "reject" if name in REPLACED else "warn" for name in INVARIANTS}, reward_min=-2, reward_max=2
)


def answer(number: int, i: int, change: Callable[[Completion], Completion]) -> Callable[[Group, int], Group]:
    """Changes one completion of one group."""

    def change_group(group: Group, at: int) -> Group:
        completions, rewards = group
        if at == number:
            completions[i] = change(completions[i])
        return completions, rewards

    return change_group


def with_logprob(value: float) -> Callable[[Group, int], Group]:
    return answer(5, 2, lambda c: replace(c, logprobs=c.logprobs.index_fill(0, torch.tensor(0), value)))


def rewards(change: Callable[[list[float]], list[float]], first: int, last: int = 10**9) -> Any:
    def change_group(group: Group, at: int) -> Group:
        return group[0], change(group[1]) if first <= at <= last else group[1]

    return change_group


def cut(group: Group, at: int) -> Group:
    """From the 40th group on all completions are as long as can be."""
    completions, rewards = group

    def at_its_longest(c: Completion) -> Completion:
        assert c.prompt_ids is not None
        size = min(MAX_TOKENS, SEQ_LEN - len(c.prompt_ids))
        return replace(c, token_ids=torch.ones(size).long(), logprobs=-torch.ones(size), stop_reason="length")

    return [at_its_longest(c) if at >= 40 else c for c in completions], rewards


def shorter(episodes: list[Episode], number: int) -> list[Episode]:
    """Episode 9/1 loses its last token on its way into the buffer."""
    if number == 9:
        c, reference = episodes[1].completion, episodes[1].ref_logprobs
        assert reference is not None
        c = replace(c, token_ids=c.token_ids[:-1], logprobs=c.logprobs[:-1])
        episodes[1] = replace(episodes[1], completion=c, ref_logprobs=reference[:-1])
    return episodes


def row(
    step: int, name: str, change: Callable[[TrainTargets, int], dict[str, Any]]
) -> Callable[[Batch, int], Batch]:
    """Changes what the batch of a step says of one episode."""

    def change_batch(batch: Batch, at: int) -> Batch:
        def changed(t: TrainTargets) -> TrainTargets:
            return replace(t, **change(t, t.episode_ids.index(name))) if name in t.episode_ids else t

        return (batch[0], [changed(t) for t in batch[1]]) if at == step else batch

    return change_batch


def added(values: Tensor | None, i: int, amount: float) -> Tensor:
    assert values is not None
    return values.index_add(0, torch.tensor(i), torch.full_like(values[:1], amount))


def listed(values: list[Any], i: int, new: Any) -> list[Any]:
    return [*values[:i], new, *values[i + 1 :]]


BROKEN = {
    "a log-probability is NaN": ("logprobs", "5/2", Spoilt(group=with_logprob(float("nan")))),
    "is -inf": ("logprobs", "5/2", Spoilt(group=with_logprob(float("-inf")))),
    "is above 0": ("logprobs", "5/2", Spoilt(group=with_logprob(0.25))),
    "one too few": ("logprobs", "5/2", Spoilt(answer(5, 2, lambda c: replace(c, logprobs=c.logprobs[1:])))),
    "none at all": ("logprobs", "5/2", Spoilt(answer(5, 2, lambda c: replace(c, logprobs=None)))),
    "no tokens": (
        "completions",
        "6/1",
        Spoilt(answer(6, 1, lambda c: replace(c, token_ids=c.token_ids[:0], logprobs=c.logprobs[:0]))),
    ),
    "no end": ("completions", "6/1", Spoilt(answer(6, 1, lambda c: replace(c, stop_reason=None)))),
    "cut too soon": ("completions", "6/1", Spoilt(answer(6, 1, lambda c: replace(c, stop_reason="length")))),
    "reward too high": ("reward_range", "7/3", Spoilt(rewards(lambda r: [*r[:3], 2.5], 7, 7))),
    "reward is NaN": ("reward_range", "7/0", Spoilt(rewards(lambda r: [float("nan"), *r[1:]], 7, 7))),
    "no variance": ("zero_variance", "103/0", Spoilt(rewards(lambda r: [sum(r) / len(r)] * len(r), 40, 103))),
    "nearly all are cut": ("truncation", "161/3", Spoilt(group=cut)),
    "rewards fall": ("reward_drift", "120/0", Spoilt(rewards(lambda r: [x - 1 for x in r], 120))),
    "a token is lost": ("token_counts", "9/1", Spoilt(episodes=shorter)),
    "the trainer skips a token": (
        "token_counts",
        "8/0",
        Spoilt(metrics=lambda m, step: {**m, "num_tokens": m["num_tokens"] - (step == 3)}),
    ),
    "older than the bound": (
        "age",
        "22/2",
        Spoilt(batch=row(6, "22/2", lambda t, i: {"policy_versions": listed(t.policy_versions, i, 3)})),
    ),
    "newer than the trainer": (
        "age",
        "22/2",
        Spoilt(batch=row(6, "22/2", lambda t, i: {"policy_versions": listed(t.policy_versions, i, 6)})),
    ),
    "trained on again": (
        "reuse",
        "5/1",
        Spoilt(batch=row(6, "22/2", lambda t, i: {"episode_ids": listed(t.episode_ids, i, "5/1")})),
    ),
    "another reference": (
        "reference_kl",
        "2/1",
        Spoilt(batch=row(1, "2/1", lambda t, i: {"ref_logprobs": added(t.ref_logprobs, i, 1.0)})),
    ),
    "another generator": (
        "ratio",
        "2/1",
        Spoilt(batch=row(1, "2/1", lambda t, i: {"generator_logprobs": added(t.generator_logprobs, i, -2)})),
    ),
    "generator left behind": (
        "ratio",
        "16/0",
        Spoilt(metrics=lambda m, step: {**m, "logprob_gap": 0.3 if step == 5 else 0.04}),
    ),
    "micro-batches count": ("gradient_scale", "0/0", Spoilt(gradient_norms=(0.5, 0.6))),
}


def steps_of(invariant: str) -> range:
    """As many as it takes."""
    return range(1, 61 if invariant in ("zero_variance", "truncation", "reward_drift") else 9)


@pytest.mark.parametrize(("invariant", "episode", "spoilt"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_invariant_is_told_with_its_episode_and_no_other(
    invariant: str, episode: str, spoilt: Spoilt, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = run(new_checks(ALL_TOLD), spoilt, steps=steps_of(invariant))
    assert outcome.fired == {invariant: 1.0} | ({"rejected": 1.0} if invariant in REPLACED else {})
    [line] = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert line.startswith(f"check {invariant}: ")
    assert re.search(r"episodes? (\d+/\d+)", line).group(1) == episode  # pyright: ignore
    number = int(episode.split("/")[0])
    assert outcome.rejected == [number] * (invariant in REPLACED)


@pytest.mark.parametrize("lag", [0, 1])
def test_nothing_is_told_of_a_sound_run_that_learns(lag: int, caplog: pytest.LogCaptureFixture) -> None:
    outcome = run(new_checks(CheckOptions(reward_min=0, reward_max=1)), lag=lag)
    assert (outcome.fired, outcome.rejected, caplog.messages) == ({}, [], [])


def test_policies_that_differ_are_not_compared() -> None:
    """A batch that an older version sampled has another ratio by right."""
    spoilt = Spoilt(metrics=lambda m, _: {**m, "logprob_gap": 0.3})
    assert run(new_checks(CheckOptions()), spoilt, steps=range(1, 9), lag=1).fired == {"ratio": 1.0}  # step 1


def test_a_run_that_goes_on_begins_with_the_checks_of_a_start_but_that_of_the_reference() -> None:
    """It may have other passes than before, and has left the reference."""
    goes_on = range(5, 8)
    left = Spoilt(batch=row(5, "16/1", lambda t, i: {"ref_logprobs": added(t.ref_logprobs, i, 1.0)}))
    assert run(new_checks(ALL_TOLD), left, steps=goes_on).fired == {}
    other = Spoilt(
        batch=row(5, "16/1", lambda t, i: {"generator_logprobs": added(t.generator_logprobs, i, -2)}),
        gradient_norms=(0.5, 0.6),
    )
    assert run(new_checks(ALL_TOLD), other, steps=goes_on).fired == {"ratio": 1, "gradient_scale": 1}


def test_of_several_updates_only_the_first_tells_of_the_generator() -> None:
    """The others find a policy that the updates before them have moved."""
    checks = new_checks(CheckOptions(ratio="stop"))

    def step(number: int, *gaps: float) -> None:
        completion = group_of(number, number - 1, 0.5)[0][0]
        _, targets = arrange([Episode(f"{number}/0", str(number), completion, "", 1.0, 1.0)], 1)
        checks.batch(targets, number)
        for gap in gaps:
            checks.step(targets, {"num_tokens": float(len(completion.token_ids)), "logprob_gap": gap})

    step(1, 0.04, 0.5, 0.5)
    with pytest.raises(InvariantBroken, match=r"differ by 0\.5 .* of step 2"):
        step(2, 0.5)


ONE_OF_EACH = {invariant: (episode, spoilt) for invariant, episode, spoilt in BROKEN.values()}


def test_there_is_a_broken_run_for_each_invariant() -> None:
    assert set(ONE_OF_EACH) == set(INVARIANTS)


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_stop_ends_the_run_naming_the_episode(invariant: str) -> None:
    episode, spoilt = ONE_OF_EACH[invariant]
    with pytest.raises(InvariantBroken, match=f"check {invariant}: .*{episode}") as caught:
        run(new_checks(replace(ALL_TOLD, **{invariant: "stop"})), spoilt, steps=steps_of(invariant))
    assert episode in caught.value.episode_ids
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("invariant", [name for name in INVARIANTS if name not in REPLACED])
def test_off_says_nothing(invariant: str) -> None:
    _, spoilt = ONE_OF_EACH[invariant]
    assert (
        run(new_checks(replace(ALL_TOLD, **{invariant: "off"})), spoilt, steps=steps_of(invariant)).fired
        == {}
    )


def test_a_group_of_a_reward_out_of_range_can_be_replaced() -> None:
    _, spoilt = ONE_OF_EACH["reward_range"]
    outcome = run(new_checks(replace(ALL_TOLD, reward_range="reject")), spoilt, steps=range(1, 9))
    assert (outcome.fired, outcome.rejected) == ({"reward_range": 1.0, "rejected": 1.0}, [7])


def test_a_run_that_replaces_every_group_ends() -> None:
    spoilt = Spoilt(group=lambda group, _: answer(0, 1, lambda c: replace(c, stop_reason=None))(group, 0))
    outcome = Outcome()
    with pytest.raises(InvariantBroken, match=f"^{MAX_REJECTED} groups in a row .*episode 99/1 ends"):
        run(new_checks(CheckOptions()), spoilt, outcome=outcome)
    assert outcome.fired["rejected"] == MAX_REJECTED


def test_lines_of_one_kind_are_written_once_a_minute_and_the_others_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr("forge.rl.checks.verdicts.time.monotonic", lambda: now)
    checks = new_checks(replace(ALL_TOLD, reward_max=0.5))
    for number in range(12):
        completions, _ = group_of(number, 0, 0.5)
        assert checks.group(number, completions, [0.0, 1.0, 0.0, 0.0])
        now += 10
    assert [re.search(r"episode (\S+)", line).group(1) for line in caplog.messages] == ["0/1", "6/1"]  # pyright: ignore
    assert caplog.messages[1].endswith("(5 more since the last line)")
    assert drain()["checks/num_reward_range"].total == 12


@pytest.mark.parametrize("invariant", ["reuse", "zero_variance", "truncation", "reward_drift"])
def test_what_is_remembered_survives_a_resume(invariant: str) -> None:
    """Within the windows, and between an episode's first and second use."""
    _, spoilt = ONE_OF_EACH[invariant]
    with pytest.raises(InvariantBroken) as uninterrupted:
        run(new_checks(replace(ALL_TOLD, **{invariant: "stop"})), spoilt)
    before = new_checks(replace(ALL_TOLD, **{invariant: "stop"}))
    first = 5 if invariant == "reuse" else 24  # step of the second part
    run(before, spoilt, steps=range(1, first))
    after = new_checks(replace(ALL_TOLD, **{invariant: "stop"}))
    after.load_state_dict(pickle.loads(pickle.dumps(before.state_dict())))
    with pytest.raises(InvariantBroken) as resumed:
        run(after, spoilt, steps=range(first, 61))
    assert str(resumed.value) == str(uninterrupted.value)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def size(steps: int) -> int:
        checks = new_checks(CheckOptions())
        run(checks, steps=range(1, steps + 1))
        return len(pickle.dumps(checks.state_dict()))

    monkeypatch.setattr("forge.rl.checks.books.MAX_EPISODES", 64)
    assert size(120) == pytest.approx(size(60), rel=0.02)
