"""Pushes: versions of the weights on their way to the store, each once, whatever is killed meanwhile."""

from collections.abc import Collection, Mapping

from torch import Tensor

# forge.weights is imported where it is used: TorchStore takes seconds

KEPT_VERSIONS = 2
"""The newest, and the one before for readers that are slow."""


async def push(version: int, tensors: Mapping[str, Tensor], *, rank: int, world_size: int) -> None:
    """Publishes this rank's part; rank 0 also retires what is too old to be read.

    A kill within leaves a version without some of its parts: see `clear_unfinished`.
    """
    from forge.weights import publish, retire, versions

    await publish(version, tensors, rank=rank, world_size=world_size)
    if rank == 0:
        for old in [v for v in await versions() if v < version][: 1 - KEPT_VERSIONS]:
            await retire(old)


async def pushed_versions() -> list[int]:
    """Those that are whole, ascending."""
    from forge.weights import versions

    return await versions()


async def clear_unfinished() -> None:
    """Retires what publishers that are gone left half published, or half retired."""
    from forge.weights import retire, unfinished

    for version in await unfinished():
        await retire(version)


def to_push_again(begun: Collection[int], whole: Collection[int]) -> list[int]:
    """Of the versions whose push was begun, those that the store should hold and does not."""
    kept = sorted({*begun, *whole})[-KEPT_VERSIONS:]
    return [version for version in kept if version not in whole]
