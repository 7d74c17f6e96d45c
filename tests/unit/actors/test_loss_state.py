"""What a loss keeps from step to step: which losses may, and what becomes of it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from forge.actors.trainer.loss_state import check_state, restore, state_of, tell_step
from forge.errors import ConfigError, ForgeError, NotFinite
from forge.rl.loss import PPOLoss, SFTLoss


class Forgetful:
    """Changes, and says nothing of it."""

    def after_step(self, metrics: Mapping[str, float]) -> None:
        raise NotFinite("no")


class Counting(Forgetful):
    """Counts steps."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def state_dict(self) -> dict[str, Any]:
        return {"steps": 10 // self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_a_loss_that_changes_must_say_what_it_has_become() -> None:
    with pytest.raises(
        ConfigError, match="^a loss with an after_step of .*: give Forgetful state_dict and load_"
    ):
        check_state(Forgetful())
    for loss in (Counting(), PPOLoss(), SFTLoss(), lambda *_: None):
        check_state(loss)


@dataclass(slots=True)
class Wandering(PPOLoss):
    """Has a state beside that of its base, which knows nothing of it."""

    steps: int = 0

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.steps += 1


def test_a_loss_that_changes_in_its_own_way_must_say_so_itself() -> None:
    with pytest.raises(ConfigError, match="^a loss with an after_step of its own .*: give Wandering state_d"):
        check_state(Wandering())


def test_what_after_step_raises_is_no_word_about_the_step() -> None:
    failure = tell_step(Counting(), {})
    assert type(failure) is ForgeError
    assert str(failure) == "the weights were updated, but after_step of the loss failed: NotFinite: no"
    assert isinstance(failure.__cause__, NotFinite)
    assert tell_step(PPOLoss(), {}) is None


def test_a_loss_goes_on_from_its_own_state_and_from_no_other(caplog: pytest.LogCaptureFixture) -> None:
    loss = Counting()
    restore(loss, state_of(Counting(5)))
    assert loss.steps == 2
    for nothing in (None, state_of(PPOLoss()), state_of(SFTLoss())):
        restore(loss, nothing)
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        restore(loss, state_of(PPOLoss(beta=0.1, kl_target=0.01)))
    assert loss.steps == 2
    [message] = caplog.messages
    assert message.endswith("Counting starts afresh: what was stored is that of forge.rl.loss.ppo.PPOLoss")


def test_what_a_loss_raises_about_its_state_is_a_forge_error_that_names_it() -> None:
    with pytest.raises(ForgeError, match="^state_dict of the loss: ZeroDivisionError: "):
        state_of(Counting(0))
    stored = state_of(Counting(1))
    assert stored is not None
    with pytest.raises(ForgeError, match="^load_state_dict of the loss: KeyError: 'steps'$"):
        restore(Counting(), {**stored, "state": {}})
