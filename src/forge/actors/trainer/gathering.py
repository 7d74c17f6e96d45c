"""Whole tensors of a model that processes share, one after the other."""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from forge.actors.trainer.checkpoint_files import whole
from forge.actors.trainer.job import Job

AHEAD_NBYTES = 1 << 30
"""Of whole tensors that a process may have gone through before the others have."""

Change = Callable[[str, Tensor], Tensor]
"""What a tensor of this name, or this process's shard of it, is replaced with."""


@torch.no_grad()
def whole_tensors(
    own: Mapping[str, Tensor], job: Job, dtype: torch.dtype, change: Change | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in full, those of other pipeline stages too, given what this process has of them; every
    process must go through all of them, and none is far ahead of the slowest: on GPUs it would wait for that
    one, which may be writing files, longer than NCCL lets it."""
    mesh = job.pp_mesh
    ahead_nbytes = 0
    shapes = [{name: tensor.shape for name, tensor in own.items()}]
    if mesh is not None:
        shapes *= mesh.size()
        dist.all_gather_object(shapes, shapes[0], group=mesh.get_group())
    for stage, parts in enumerate(shapes):
        for name, shape in parts.items():
            if name in own:
                tensor = own[name] if change is None else change(name, own[name])
                tensor = whole(tensor.to(dtype))
            else:
                tensor = torch.empty(shape, dtype=dtype, device=job.device)
            if mesh is not None:
                tensor = tensor.to(job.device)  # offloaded ones are elsewhere
                dist.broadcast(tensor, group=mesh.get_group(), group_src=stage)
            yield name, tensor
            ahead_nbytes += tensor.nbytes
            if job.world_size > 1 and ahead_nbytes >= AHEAD_NBYTES:
                arrived = torch.ones((), device=job.device)
                dist.all_reduce(arrived)
                arrived.item()  # this process waits, and not only its device
                ahead_nbytes = 0
