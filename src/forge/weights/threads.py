"""The thread of this process that copies weights and takes their fingerprints."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


@cache
def _thread() -> ThreadPoolExecutor:
    """One thread: the event loop stays free, and torch makes its own threads for it once."""
    return ThreadPoolExecutor(1, thread_name_prefix="weights")


async def in_thread(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_thread(), partial(function, *args, **kwargs))
