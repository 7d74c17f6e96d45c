"""What happens in a new process before anything heavy is imported: its rank, its device, its threads."""

import os

from forge.controller._monarch import current_rank


def bootstrap(env: dict[str, str], gpus: list[str], procs_per_host: int) -> None:
    """Sets the environment of one process of a mesh; `gpus` are those of all its processes.

    OpenMP reads its settings when torch is first imported, CUDA when it is first used: both later than this.
    """
    rank = current_rank().rank
    os.environ.update(env)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % procs_per_host))
    if gpus:
        os.environ.update(CUDA_VISIBLE_DEVICES=gpus[rank], LOCAL_RANK="0")
    else:  # a process without a GPU of its own must not take one that another holds
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
