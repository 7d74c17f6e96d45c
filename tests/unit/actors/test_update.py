"""The learning rate of every step, also of those after the last that was announced."""

from typing import Any

import pytest
import torch
from torch import nn

from forge.actors.trainer.options import OptimizerOptions, SchedulerOptions, TrainingOptions
from forge.actors.trainer.update import Update

STEPS, LR = 5, 0.5


def update_by(decay: Any) -> Update:
    schedule, training = SchedulerOptions(decay=decay), TrainingOptions(steps=STEPS)
    return Update([nn.Linear(2, 2)], OptimizerOptions(lr=LR), schedule, training)


def rates(update: Update, num: int) -> list[float]:
    found = []
    for _ in range(num):
        for parameter in update.parameters:
            parameter.grad = torch.zeros_like(parameter)
        found.append(update.step())
    return found


@pytest.mark.parametrize(
    ("decay", "in_between", "end"), [("constant", 1, 1), ("linear", 0.6, 0), ("cosine", 0.6545, 0)]
)
def test_the_learning_rate_stays_where_it_ends(decay: str, in_between: float, end: float) -> None:
    update = update_by(decay)
    found = rates(update, STEPS + 4)
    assert found[0] == LR and found[2] == pytest.approx(LR * in_between, rel=1e-3)
    assert found[STEPS:] == pytest.approx([LR * end] * 4, abs=1e-9)
    assert update.num_steps == STEPS + 4
    resumed = update_by(decay)
    resumed.resume(STEPS + 4)
    assert rates(resumed, 2) == pytest.approx([LR * end] * 2, abs=1e-9)
