"""What every module of these tests has around it."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def its_garbage_goes_with_it() -> Iterator[None]:
    """Finalizers of actors and tasks may format a traceback; where that comes within `ast.parse`, as of
    pytest's own reports, Python before 3.11.8 fails (CPython's gh-106905)."""
    yield
    gc.collect()
