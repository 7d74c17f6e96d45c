"""What the processors of this machine can do."""

import logging
import re
from functools import cache
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

CPU_INFO = Path("/proc/cpuinfo")


@cache
def cpu_flags() -> frozenset[str]:
    """The extensions that the CPU has, by the names that Linux gives them; none where it does not say."""
    found = None
    if CPU_INFO.exists():
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", CPU_INFO.read_text(), re.MULTILINE)
    return frozenset(found[1].split() if found else ())


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies matrices in bfloat16: without instructions for it PyTorch takes 3 to 100
    times as long as in float32."""
    return not cpu_flags().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def fast_dtype(*, on_gpu: bool) -> Literal["bfloat16", "float32"]:
    """What models are computed in unless their user says otherwise."""
    return "bfloat16" if on_gpu or cpu_has_bfloat16() else "float32"


def warn_of_slow_bfloat16(who: str) -> None:
    """For whoever computes in bfloat16 on this CPU."""
    if not cpu_has_bfloat16():
        logger.warning(
            "%s computes in bfloat16, which this CPU has no instructions for: float32 is faster", who
        )
