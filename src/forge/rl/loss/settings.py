"""What the losses ask of their settings."""

import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from forge.errors import ConfigError


def require(settings: object, name: str, holds: bool, rule: str) -> None:
    """ConfigError "`name` must `rule`, got ..." unless it holds; NaN should make `holds` false."""
    if not holds:
        raise ConfigError(f"{name} must {rule}, got {getattr(settings, name)!r}")


def require_finite(settings: object, *names: str) -> None:
    """ConfigError for the first of these that is infinite or NaN: the loss would be NaN. None may pass."""
    for name in names:
        value = getattr(settings, name)
        require(settings, name, value is None or math.isfinite(value), "be finite")


def require_clips(settings: Any) -> None:
    """ConfigError unless ratios are clipped to a range around 1."""
    low = settings.clip_low
    require(settings, "clip_low", low is not None and 0 <= low <= 1, "lie in [0, 1]")
    require(settings, "clip_high", settings.clip_high >= 0, "not be negative")


def require_choices(settings: Any) -> None:
    """ConfigError for the first field of a dataclass whose type is a Literal that does not have its value."""
    for name, hint in get_type_hints(type(settings)).items():
        if get_origin(hint) is Literal:
            choices = get_args(hint)
            require(settings, name, getattr(settings, name) in choices, f"be one of {', '.join(choices)}")
