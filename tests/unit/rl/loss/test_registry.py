"""Losses by name: what `make_loss` makes of a name, a mapping or a dotted path, and what it refuses."""

import pickle
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from forge.errors import ConfigError
from forge.rl.loss import (
    LOSSES,
    DAPOLoss,
    GSPOLoss,
    OffPolicyCorrection,
    PolicyLoss,
    PPOLoss,
    REINFORCELoss,
    SFTLoss,
    arguments_of,
    loss_class,
    make_loss,
)
from tests.unit.rl.loss.batches import evaluate, make_batch

BATCH = make_batch([[True, True, False], [True, True, True]], seed=0)


class Plain:
    """A user's class, with arguments of any kind."""

    def __init__(self, scale: float, *, shift: float = 0.0) -> None:
        if scale < 0:
            raise ConfigError(f"scale must not be negative, got {scale}")
        self.scale, self.shift = 1 / scale, shift

    def __call__(self, logits: Tensor, *_: Tensor, **__: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return logits.sum() * self.scale, {}


class TakesAny(Plain):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(arguments["scale"])


class NoLoss:
    pass


@dataclass(kw_only=True)
class Hinge(PolicyLoss):
    """A user's policy gradient: a surrogate and nothing else."""

    margin: float = 0.5

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        gap = logprobs - old_logprobs
        return -(gap * advantages).clamp(max=self.margin), {"far": gap.abs() > self.margin}


@dataclass
class Bounds:
    low: float = 0.5
    width: float = field(init=False, default=0.5)
    unit: ClassVar[str] = "nats"


@dataclass
class Remembers(Plain):
    """A user's dataclass: with fields of its own doing, and of types that no file holds."""

    scale: float
    shift: float = 0.0
    bounds: Bounds | None = None
    pair: tuple[float, float] | None = None
    device: torch.device | float = 0.0
    seen: list[float] = field(init=False, default_factory=list)


def function(logits: Tensor, *_: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return logits.sum(), {}


@pytest.fixture(autouse=True)
def user_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_pkg.losses")
    for loss in (Plain, TakesAny, NoLoss, Hinge, Remembers, function):
        setattr(module, loss.__name__, loss)
    monkeypatch.setitem(sys.modules, "my_pkg", ModuleType("my_pkg"))
    monkeypatch.setitem(sys.modules, "my_pkg.losses", module)


@pytest.mark.parametrize("name", LOSSES)
def test_every_name_makes_a_loss_that_travels_between_processes(name: str) -> None:
    loss = make_loss(name, horizon=7)
    assert type(loss) is loss_class(name)
    assert pickle.loads(pickle.dumps(loss)) == loss
    assert getattr(loss, "horizon", 7) == 7
    value, gradient, metrics = evaluate(loss, BATCH)
    assert value.isfinite() and gradient.abs().sum() > 0
    assert not any(metric.requires_grad for metric in metrics.values())


def test_arguments_win_over_what_the_name_stands_for_and_that_over_defaults() -> None:
    assert make_loss("gspo_token", level="sequence") == GSPOLoss(level="token")
    assert make_loss({"name": "gspo_token", "level": "sequence"}, level="token") == GSPOLoss()
    assert make_loss({"name": "dapo", "clip_high": 1}, horizon=3, foo=1) == DAPOLoss(clip_high=1.0, horizon=3)
    assert make_loss("sft", horizon=3) == SFTLoss()  # which has no such argument
    assert make_loss("rloo") == REINFORCELoss()
    nested = make_loss({"name": "ppo", "correction": {"kind": "truncate", "cap": 3}})
    assert nested == PPOLoss(correction=OffPolicyCorrection("truncate", cap=3.0))


def test_a_users_class_or_function() -> None:
    plain: Any = make_loss({"name": "my_pkg.losses.Plain", "scale": 2}, shift=1.0, horizon=3)
    assert (plain.scale, plain.shift) == (0.5, 1.0)
    assert arguments_of(Plain) == ["scale", "shift"]
    any_arguments: Any = make_loss({"name": "my_pkg.losses.TakesAny", "scale": 4})
    assert any_arguments.scale == 0.25
    assert make_loss("my_pkg.losses.function") is function


def test_a_users_dataclass_is_made_with_those_fields_that_it_takes() -> None:
    made = make_loss(
        {"name": "my_pkg.losses.Remembers", "scale": 2, "bounds": {"low": 1}, "pair": None, "device": 1}
    )
    assert made == Remembers(2.0, bounds=Bounds(1.0), device=1.0)


def test_a_users_policy_loss_is_its_surrogate() -> None:
    loss: Any = make_loss({"name": "my_pkg.losses.Hinge", "margin": 0.1, "beta": 0.1, "entropy_coef": 0.1})
    value, _, metrics = evaluate(loss, BATCH)
    want = metrics["policy"] + 0.1 * metrics["kl"] - 0.1 * metrics["entropy"]
    torch.testing.assert_close(value, want)
    assert 0 < metrics["far"] < 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "dapoo",
            r"^loss must be one of grpo, .*, sft, or the dotted path of a class, got 'dapoo': did you "
            r"mean dapo\?$",
        ),
        ({"clip_low": 0.1}, "^loss must be a name, or a mapping with a name among its keys, got {"),
        (3, "^loss must be a name, .* got 3$"),
        ("no_pkg.Loss", "^loss no_pkg.Loss: can't import no_pkg: .* on PYTHONPATH$"),
        (
            "my_pkg.losses.hinge",
            r"^loss my_pkg.losses.hinge: my_pkg.losses has no class hinge: did you mean "
            r"Hinge\?$",
        ),
        (
            {"name": "gspo", "clip_lo": 0.1},
            r"^loss gspo has no argument clip_lo: it has beta, .*, level: did "
            r"you mean clip_low\?$",
        ),
        ({"name": "sft", "beta": 0.1}, "^loss sft has no argument beta: it has none$"),
        ({"name": "my_pkg.losses.function", "a": 1}, "^loss .*function has no argument a: it has none$"),
        ({"name": "gspo", "clip_low": "small"}, "^loss.clip_low must be a number, got 'small'$"),
        ({"name": "gspo", "clip_low": 7}, r"^loss.clip_low must lie in \[0, 1\], got 7.0$"),
        ({"name": "dapo", "adaptive_kl": 1}, "^loss.adaptive_kl must be true or false, got 1$"),
        (
            {"name": "ppo", "correction": {"cap": 3.0}},
            "^loss.correction.kind is required: .*--loss.correction",
        ),
        (
            {"name": "ppo", "correction": {"kind": "cut"}},
            "^loss.correction.kind must be one of .* got 'cut'$",
        ),
        (
            {"name": "ppo", "correction": {"kind": "mask", "hi": 1}},
            "^unknown key loss.correction.hi: did you",
        ),
        (
            {"name": "ppo", "correction": {"kind": "mask", "high": 0.9}},
            "^loss.correction.high must be at least 1",
        ),
        (
            {"name": "ppo", "correction": {"kind": "mask", "low": 1.1}},
            r"^loss.correction.low must lie in \[0",
        ),
        (
            {"name": "ppo", "correction": {"kind": "truncate", "cap": 0}},
            "^loss.correction.cap must be above 0",
        ),
        ({"name": "my_pkg.losses.Plain", "scale": -1}, "^loss.scale must not be negative, got -1$"),
        ({"name": "my_pkg.losses.Plain", "scale": 0}, "^loss .*Plain can't be made: ZeroDivisionError: "),
        ("my_pkg.losses.Plain", "^loss .*Plain can't be made: TypeError: .*'scale'"),
        ({"name": "my_pkg.losses.Remembers", "seen": []}, "^loss .* has no argument seen: it has scale, sh"),
        *(
            (
                {"name": "my_pkg.losses.Remembers", "scale": 1.0, "bounds": {name: 1.0}},
                f"^unknown key loss.bounds.{name}: ",
            )
            for name in ("width", "unit")
        ),
        (
            {"name": "my_pkg.losses.Remembers", "scale": 1.0, "pair": [1.0, 2.0]},
            r"^loss.pair can't be set in a configuration: it is of type tuple\[float, float\], not one of",
        ),
        (
            {"name": "my_pkg.losses.Remembers", "scale": 1.0, "device": "cpu"},
            "^loss.device can't be set in a configuration: it is of type device, not one of",
        ),
        ({"name": "dapo", "clip_range": 0.1, "clip_low": 0.3}, "^loss.clip_range must stand alone: "),
        ({"name": "collections.OrderedDict", "a": 1}, "^loss collections.OrderedDict has no argument a"),
        ("collections.OrderedDict", "^loss collections.OrderedDict must be callable"),
        ("os.path.basename", r"^loss os.path.basename must take \(logits, .* but it takes \(p\)$"),
        ("torch.nn.CrossEntropyLoss", r"^loss torch.nn.CrossEntropyLoss must take \(logits, .*\(input"),
        ("my_pkg.losses.NoLoss", "^loss my_pkg.losses.NoLoss must be callable: give NoLoss a __call__$"),
    ],
)
def test_what_does_not_fit_is_told_with_what_would(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loss(spec)
