"""What is let in is never too old, whatever is preferred: against brute force, and in runs of pure chance."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.actors.buffer.choice import ORDERS, choose
from forge.actors.buffer.groups import Group, group_of
from forge.actors.buffer.slack import Slack
from forge.actors.buffer.terms import Strategy
from forge.actors.replay_buffer import BufferInfo, ReplayBuffer
from tests.unit.actors.test_replay_buffer_kill import episode, ids

AGE = 3  # the policies are of versions 0 to 3 where the trainer is at 3: due at 3 to 6


@st.composite
def waiting(draw: st.DrawFn) -> tuple[list[tuple[int, Group]], dict[int, int], int]:
    """Single episodes, promised or not; episodes under way, by when they are due; episodes of a step."""
    groups = []
    for number in range(draw(st.integers(1, 8))):
        e = replace(episode(str(number), draw(st.integers(0, 3))), advantage=float(draw(st.integers(-3, 3))))
        groups.append((number, group_of(draw(st.integers(0, 9)), [e], is_promised=draw(st.booleans()))))
    running = draw(st.dictionaries(st.integers(AGE, 2 * AGE), st.integers(1, 3), max_size=2))
    return groups, running, draw(st.integers(1, 3))


def due_of(group: Group) -> int | None:
    return group.version + AGE if group.is_promised else None


def dues(groups: Iterable[tuple[int, Group]]) -> Counter[int]:
    return Counter(due for _, g in groups if (due := due_of(g)) is not None)


def keeps_all(due: list[int], version: int, per_step: int) -> bool:
    """Whether steps from this version on, with so many each, can take everything by when it is due: by doing
    it, the most urgent first."""
    left = sorted(due)
    while left:
        if left[0] < version:
            return False
        left, version = left[per_step:], version + 1
    return True


@pytest.mark.parametrize("strategy", ORDERS)
@given(case=waiting())
@settings(max_examples=150, deadline=None)
def test_a_batch_is_the_most_preferred_of_those_that_leave_every_promise_possible(
    strategy: Strategy, case: tuple[list[tuple[int, Group]], dict[int, int], int]
) -> None:
    groups, running, per_step = case
    promised = dues(groups)
    under_way = list(Counter(running).elements())
    if not keeps_all([*promised.elements(), *under_way], AGE, per_step):
        return  # it is not to be kept any more
    ordered = sorted(groups, key=ORDERS[strategy])
    possible = [
        batch
        for batch in itertools.combinations(ordered, per_step)  # the most preferred first
        if keeps_all([*(promised - dues(batch)).elements(), *under_way], AGE + 1, per_step)
    ]
    slack = Slack(promised, running, AGE, per_step, per_step)
    assert slack.can_fill(promised, len(groups) - promised.total()) == bool(possible)
    if possible:
        chosen = choose(groups, strategy, slack, due_of)
        assert [serial for serial, *_ in chosen] == [serial for serial, _ in possible[0]]


async def run(seed: int, strategy: Strategy, reuse: int, steps: int = 25) -> BufferInfo:
    """A run in which rollouts, steps and updates take as long as chance wants, others add groups of their
    own, and the bound moves. What was let in must come, whole, and young enough."""
    chance = random.Random(seed)
    interval = chance.choice([1, 1, 2])
    age = max(reuse - 1, interval - 1) + chance.randint(0, 3)
    size, groups_per_step = chance.choice([1, 2, 4]), chance.choice([1, 2, 3, 8])
    longest = {what: chance.choice([0, 2, 10, 50]) for what in ("rollout", "train", "update", "stranger")}
    terms = {"strategy": strategy, "reuse": reuse, "sync_interval": interval}
    buffer = ReplayBuffer(size * groups_per_step, age, **terms)
    version_of: dict[str, int] = {}
    uses: Counter[str] = Counter()
    generating = 0

    async def take(what: str) -> None:
        for _ in range(chance.randint(0, longest[what])):
            await asyncio.sleep(0)

    def group(name: str) -> list:
        version_of[name] = generating
        advantage = chance.random()
        members = [episode(f"{name}/{i}", generating) for i in range(size)]
        return [replace(e, group_id=name, advantage=advantage) for e in members]

    async def roll() -> None:
        while True:
            number = await buffer.admit(size)
            begun = generating
            while chance.random() < 0.2:
                await take("rollout")
                number, begun = await buffer.restart(number), generating
            await take("rollout")
            brought = group(str(number))
            version_of[str(number)] = begun
            completions = [replace(e.completion, generator_version=begun) for e in brought]
            await buffer.add(*(replace(e, completion=c) for e, c in zip(brought, completions, strict=True)))

    async def strangers() -> None:
        for number in itertools.count():
            await take("stranger")
            await asyncio.sleep(0)
            if (await buffer.size()) < 20 * size:
                await buffer.add(*group(f"stranger {number}"))

    async def update(version: int) -> None:
        nonlocal generating
        await take("update")
        generating = version
        await buffer.generating(version)

    await buffer.generating(0)
    tasks = [asyncio.create_task(roll()) for _ in range(chance.choice([1, 4, 30]))]
    if chance.random() < 0.5:
        tasks.append(asyncio.create_task(strangers()))
    updating = asyncio.create_task(update(0))
    for version in range(steps):
        names = ids(await buffer.sample(version, wait=True))
        assert len(set(names)) == len(names) == size * groups_per_step
        assert all(version - version_of[name.split("/")[0]] <= age for name in names)
        assert all(num == size for num in Counter(name.split("/")[0] for name in names).values())
        uses.update(names)
        await take("train")
        if (version + 1) % interval == 0:
            await updating
            updating = asyncio.create_task(update(version + 1))
        if chance.random() < 0.2:
            await buffer.bound(chance.randint(interval - 1, age))
    assert max(uses.values()) <= reuse
    for task in tasks:
        assert not task.done()
        task.cancel()
    await updating
    info = await buffer.info()
    assert info.num_sampled == len(uses) and info.num_reused == uses.total() - len(uses)
    dropped = set(buffer._queue.history.gone) - set(uses)
    assert all(name.startswith("stranger") for name in dropped)
    assert info.num_added == info.num_waiting + info.num_sampled + info.num_dropped
    return info


@pytest.mark.parametrize("strategy", ORDERS)
@pytest.mark.parametrize("reuse", [1, 3])
def test_whatever_takes_how_long_what_was_let_in_is_trained_on_in_time(
    strategy: Strategy, reuse: int
) -> None:
    num_reused = 0
    for seed in range(15):
        try:
            num_reused += asyncio.run(asyncio.wait_for(run(seed, strategy, reuse), 10)).num_reused
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"seed {seed}") from error
    assert (num_reused > 0) == (reuse > 1)
