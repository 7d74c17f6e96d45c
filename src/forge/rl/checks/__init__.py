"""Checks that a run is what it claims to be: its invariants, and the canary of its weights."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forge.rl.checks.options import CheckOptions

if TYPE_CHECKING:
    from forge.rl.checks.canary import CANARY_TOKENS, canary_texts, check_weights_arrived, logprobs_of
    from forge.rl.checks.invariants import Checks

__all__ = ["CANARY_TOKENS", "CheckOptions", "Checks", "canary_texts", "check_weights_arrived", "logprobs_of"]


def __getattr__(name: str) -> Any:
    """All but the options once it is asked for: a configuration reads those where torch is not wanted yet."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "invariants" if name == "Checks" else "canary"
    return getattr(import_module(f"forge.rl.checks.{module}"), name)
