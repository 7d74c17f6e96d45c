"""Verdicts: what follows from a finding."""

import logging
import time

from forge.errors import InvariantBroken
from forge.observability import record
from forge.rl.checks.finding import Finding
from forge.rl.checks.options import CheckOptions

logger = logging.getLogger(__name__)

SILENCE_S = 60.0
"""Between two lines about the same invariant; those between are counted."""

MAX_REJECTED = 100
"""Groups in a row that are replaced, before that ends the run: nothing is trained on meanwhile."""


class Verdicts:
    """Warns, rejects or stops, as the options say. Each finding counts in the metric checks/num_INVARIANT."""

    def __init__(self, options: CheckOptions) -> None:
        self._options = options
        self._told: dict[str, float] = {}  # when a line was last written, by invariant
        self._untold: dict[str, int] = {}  # findings since
        self._num_rejected = 0  # groups in a row

    def wants(self, invariant: str) -> bool:
        """Whether it is looked at."""
        return getattr(self._options, invariant) != "off"

    def of(self, finding: Finding) -> bool:
        """Whether a group with it is replaced. Raises InvariantBroken where the run ends."""
        record("checks", **{f"num_{finding.invariant}": 1.0})
        consequence = getattr(self._options, finding.invariant)
        if consequence == "stop":
            raise InvariantBroken(
                f"{finding} (checks.{finding.invariant} is stop; warn would only tell)", finding.episode_ids
            )
        self._warn(finding, "; the group is replaced" if consequence == "reject" else "")
        return consequence == "reject"

    def rejected(self, finding: Finding) -> None:
        """Counts a group that is replaced. Raises InvariantBroken for one too many in a row."""
        record("checks", num_rejected=1.0)
        self._num_rejected += 1
        if self._num_rejected >= MAX_REJECTED:
            raise InvariantBroken(
                f"{self._num_rejected} groups in a row were replaced, and nothing is trained on. The last "
                f"one: {finding}",
                finding.episode_ids,
            )

    def accepted(self) -> None:
        """A group is not replaced."""
        self._num_rejected = 0

    def _warn(self, finding: Finding, consequence: str) -> None:
        now = time.monotonic()
        if now - self._told.get(finding.invariant, -SILENCE_S) < SILENCE_S:
            self._untold[finding.invariant] = self._untold.get(finding.invariant, 0) + 1
            return
        others = self._untold.pop(finding.invariant, 0)
        self._told[finding.invariant] = now
        logger.warning("%s%s%s", finding, consequence, f" ({others} more since the last line)" * bool(others))
