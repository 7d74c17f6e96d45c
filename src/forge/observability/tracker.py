"""Tracker: hands each step's metrics to every sink."""

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Somewhere metrics go."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes one step's metrics by name ("group/name"); no name may be relied on."""
        ...

    def close(self) -> None:
        """Ends the output; called once."""
        ...


class Tracker:
    """`with Tracker([...]) as tracker: tracker.log(step, values)`."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Steps count from 1. What a sink raises is raised."""
        for sink in self._sinks:
            sink.log(step, values)

    def close(self) -> None:
        """Closes every sink, the last one first, even if one fails; the first error is raised at the end.
        A second call does nothing."""
        errors: list[Exception] = []
        while self._sinks:
            try:
                self._sinks.pop().close()
            except Exception as error:  # the other sinks must be closed too; raised below
                errors.append(error)
        for error in errors[1:]:
            logger.warning("while closing a sink: %s: %s", type(error).__name__, error)
        if errors:
            raise errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
