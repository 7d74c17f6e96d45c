"""Losses by name: the built-in ones, and a user's own by the dotted path of its class."""

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from forge.errors import ConfigError
from forge.rl.loss.cispo import CISPOLoss
from forge.rl.loss.dapo import DAPOLoss
from forge.rl.loss.grpo import GRPOLoss
from forge.rl.loss.gspo import GSPOLoss
from forge.rl.loss.ppo import PPOLoss
from forge.rl.loss.reinforce import REINFORCELoss
from forge.rl.loss.sapo import SAPOLoss
from forge.rl.loss.sft import SFTLoss
from forge.schema import build

Loss = Callable[..., tuple[Tensor, Mapping[str, Tensor | float]]]
"""(logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs) -> (loss, metrics)."""

LOSSES: dict[str, tuple[type[Any], dict[str, Any]]] = {  # name -> (class, arguments that the name stands for)
    "grpo": (GRPOLoss, {}),
    "dr_grpo": (GRPOLoss, {"clip_high": 0.2, "beta": 0.0, "agg_type": "fixed_horizon"}),
    "dapo": (DAPOLoss, {}),
    "cispo": (CISPOLoss, {}),
    "gspo": (GSPOLoss, {}),
    "gspo_token": (GSPOLoss, {"level": "token"}),
    "sapo": (SAPOLoss, {}),
    "reinforce": (REINFORCELoss, {}),
    "rloo": (REINFORCELoss, {}),
    # arXiv 2501.03262 (v9): the mean of each answer's tokens first; with a baseline, a k2 term in the loss
    "reinforce_pp": (PPOLoss, {"agg_type": "sequence_mean"}),
    "reinforce_pp_baseline": (PPOLoss, {"agg_type": "sequence_mean", "kl_kind": "k2"}),
    "ppo": (PPOLoss, {}),
    "sft": (SFTLoss, {}),
}


def make_loss(spec: str | Mapping[str, Any], **defaults: Any) -> Loss:
    """A name of `LOSSES` or the dotted path of a class, or {name: that, **arguments} -> the loss.

    defaults: arguments that are taken where `spec` and the name leave them open and the loss has them.
    Raises ConfigError for whatever does not fit; keys in its message begin with "loss.".
    """
    name, given = name_and_arguments(spec)
    kind = loss_class(name)
    _, preset = LOSSES.get(name, (kind, {}))
    known = arguments_of(kind)
    _check_names(name, kind, given)
    defaults = {key: value for key, value in defaults.items() if key in known}
    return _make(name, kind, {**defaults, **preset, **given})


def name_and_arguments(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The parts of what `make_loss` takes. Raises ConfigError where there is no name."""
    arguments = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
    name = arguments.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"loss must be a name, or a mapping with a name among its keys, got {spec!r}")
    return name, arguments


def loss_class(name: str) -> Any:
    """The class of a name or dotted path; a path may also lead to a function, which is a loss itself.

    Raises ConfigError when there is none.
    """
    if name in LOSSES:
        return LOSSES[name][0]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise ConfigError(
            f"loss must be one of {', '.join(LOSSES)}, or the dotted path of a class, got {name!r}"
            + _guess(name, LOSSES)
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # of a user's module; translated, to say who asked for it
        fix = ": install it, or put its folder on PYTHONPATH" if isinstance(error, ImportError) else ""
        told = f"{type(error).__name__}: {error}"
        raise ConfigError(f"loss {name}: can't import {module_name}: {told}{fix}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        callables = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"loss {name}: {module_name} has no class {attribute}{_guess(attribute, callables)}"
        )
    return found


def arguments_of(kind: Any) -> list[str]:
    """The names of the arguments that a loss is made with; none for a function, which is a loss already."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [it.name for it in _parameters(kind) if it.kind in named]


def _parameters(kind: Any) -> list[inspect.Parameter]:
    if not isinstance(kind, type):
        return []
    try:
        return list(inspect.signature(kind).parameters.values())
    except (TypeError, ValueError):  # of a class that is not written in Python
        return []


def _check_names(name: str, kind: Any, given: Mapping[str, Any]) -> None:
    known = arguments_of(kind)
    for key in given:
        if key not in known and not _takes_any(kind):
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"loss {name} has no argument {key}: {there}{_guess(key, known)}")


def _takes_any(kind: Any) -> bool:
    return any(it.kind is it.VAR_KEYWORD for it in _parameters(kind))


def signature_of(loss: Callable[..., object]) -> inspect.Signature:
    """What a call of it takes; of a module, whose call takes anything, its forward."""
    return inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss)


def _check_call(name: str, loss: Any) -> None:
    """ConfigError unless it takes six arguments, as far as that can be read."""
    try:
        signature = signature_of(loss)
    except (TypeError, ValueError):  # of a callable that is not written in Python
        return
    try:
        signature.bind(*range(6))
    except TypeError as error:
        raise ConfigError(
            f"loss {name} must take (logits, target_ids, advantages, generator_logprobs, loss_mask, "
            f"ref_logprobs), but it takes {signature}"
        ) from error


def _make(name: str, kind: Any, arguments: dict[str, Any]) -> Loss:
    if not isinstance(kind, type):
        _check_call(name, kind)
        return kind
    try:
        if dataclasses.is_dataclass(kind):  # whose fields say what they take
            config = dataclasses.make_dataclass("Config", [("loss", kind)])
            loss = build(config, {"loss": arguments}).loss
        else:
            loss = kind(**arguments)
    except ConfigError as error:
        named = str(error) if dataclasses.is_dataclass(kind) else f"loss.{error}"
        raise type(error)(named) from error
    except Exception as error:  # of a user's class; translated, to say who asked for it
        raise ConfigError(f"loss {name} can't be made: {type(error).__name__}: {error}") from error
    if not callable(loss):
        raise ConfigError(f"loss {name} must be callable: give {kind.__name__} a __call__")
    _check_call(name, loss)
    return cast("Loss", loss)


def _guess(name: str, known: Iterable[str]) -> str:
    spelled = {key.lower(): key for key in known}
    guesses = difflib.get_close_matches(name.lower(), spelled, 1)
    return f": did you mean {spelled[guesses[0]]}?" if guesses else ""
