"""What a run says about itself: metrics of every process, and the sinks they go to."""

from forge.observability.metrics import phase, record

__all__ = ["phase", "record"]
