"""Generators are asleep exactly while the trainer works, whatever becomes of it."""

import asyncio
from typing import Any, cast

import pytest

from forge.errors import FanoutError
from forge.rl.colocation import Colocation


class Endpoint:
    def __init__(self, log: list[str], name: str, error: Exception | None = None) -> None:
        self.log, self.name, self.error = log, name, error

    async def fanout(self) -> list[None]:
        self.log.append(self.name)
        if self.error is not None:
            raise self.error
        return [None]

    call = fanout


class Machines:
    """A generator, a trainer and a reference model that write down what they are told."""

    def __init__(self, sleep_error: Exception | None = None) -> None:
        self.log: list[str] = []
        self.sleep, self.wake = Endpoint(self.log, "sleep", sleep_error), Endpoint(self.log, "wake")
        self.release_memory = Endpoint(self.log, "release")

    def colocation(self, *, is_on: bool, has_reference: bool = True) -> Colocation:
        every: Any = cast(Any, self)
        return Colocation(every, every, every if has_reference else None, is_on=is_on)


async def train(machines: Machines, colocation: Colocation, error: BaseException | None = None) -> None:
    async with colocation.training():
        machines.log.append("train")
        if error is not None:
            raise error


def test_generators_sleep_while_the_trainer_works_and_memory_is_given_back_on_both_sides() -> None:
    machines = Machines()
    asyncio.run(train(machines, machines.colocation(is_on=True)))
    assert machines.log == ["sleep", "release", "train", "release", "wake"]
    machines.log.clear()
    asyncio.run(train(machines, machines.colocation(is_on=True, has_reference=False)))
    assert machines.log == ["sleep", "train", "release", "wake"]


def test_with_devices_of_their_own_nobody_gives_way() -> None:
    machines = Machines()
    asyncio.run(train(machines, machines.colocation(is_on=False)))
    assert machines.log == ["train"]


def test_they_wake_after_a_step_that_failed_was_cancelled_or_never_began() -> None:
    for error in (ValueError("no step"), asyncio.CancelledError()):
        machines = Machines()
        with pytest.raises(type(error)):
            asyncio.run(train(machines, machines.colocation(is_on=True), error))
        assert machines.log[-2:] == ["train", "wake"]
    machines = Machines(sleep_error=FanoutError("replica 1"))
    with pytest.raises(FanoutError, match="replica 1"):
        asyncio.run(train(machines, machines.colocation(is_on=True)))
    assert machines.log == ["sleep", "wake"]
