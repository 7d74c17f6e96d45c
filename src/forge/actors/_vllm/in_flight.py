"""InFlight: what becomes of the requests that run while weights are exchanged."""

from enum import Enum

from forge.errors import ConfigError


class InFlight(Enum):
    """In each case a token's version is that of the weights that it was sampled from."""

    RECOMPUTE = "recompute"  # they go on, with their KV cache computed anew by the new weights
    KEEP = "keep"  # they go on with the KV cache of the old weights (PipelineRL, arXiv 2509.19128)
    FINISH = "finish"  # they end under the old weights, and new requests wait until then

    @classmethod
    def of(cls, value: str) -> "InFlight":
        """By its name in a config; ConfigError for any other."""
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(kind.value for kind in cls)
            raise ConfigError(f"in_flight must be one of {names}, got {value!r}") from None
