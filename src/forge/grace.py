"""What an interrupted run may still do: save, within the time that whoever ends it is taken to give."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from forge.errors import ForgeError

SAVE_GRACE_S = 20.0
"""Slurm and Kubernetes kill a job 30 s after their SIGTERM; to stop the machines takes up to 10."""


async def save_in_time(save: Callable[[], Awaitable[object]], grace_s: float = SAVE_GRACE_S) -> bool:
    """Awaits `save`, and says on stderr how that went; False when it failed or took too long."""
    print(f"saving a checkpoint, for {grace_s:g} s at most", file=sys.stderr, flush=True)
    try:
        async with asyncio.timeout(grace_s):
            await save()
    except TimeoutError:
        problem = f"not done within {grace_s:g} s"
    except ForgeError as error:
        problem = str(error)
    else:
        print("saved", file=sys.stderr, flush=True)
        return True
    print(f"no checkpoint was saved, those before it stay: {problem}", file=sys.stderr, flush=True)
    return False
