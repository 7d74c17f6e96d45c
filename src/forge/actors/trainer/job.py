"""The processes that hold one model together: their device, process group and meshes."""

import contextlib
import os
from collections.abc import Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from forge.actors import _titan as titan
from forge.actors.trainer.gloo import use_one_thread
from forge.actors.trainer.parallelism import ParallelismOptions

T = TypeVar("T")
SPMD_BACKEND = "partial_dtensor"
"""The backend of torchtitan 0.3 that works with torch 2.13 on more than one process."""


class Job:
    """This process's place among `world_size` that share a model as `parallelism` says."""

    def __init__(
        self, parallelism: ParallelismOptions, *, world_size: int, seed: int, cpu_offload: bool
    ) -> None:
        self.world_size = world_size
        self.device = _local_device()
        self.num_stages = parallelism.num_stages
        self.layout = titan.ParallelismConfig(
            tensor_parallel_degree=parallelism.tensor_parallel_degree,
            pipeline_parallel_degree=parallelism.pipeline_parallel_degree,
            pipeline_parallel_schedule=parallelism.pipeline_parallel_schedule,
            context_parallel_degree=parallelism.context_parallel_degree,
            data_parallel_shard_degree=parallelism.data_parallel_shard_degree,
            data_parallel_replicate_degree=parallelism.data_parallel_replicate_degree,
            enable_sequence_parallel=False,  # streams need not divide by the degree
            spmd_backend=SPMD_BACKEND,
        )
        titan.set_spmd_backend(SPMD_BACKEND)
        self._owns_process_group = world_size > 1 and not dist.is_initialized()
        if world_size > 1:  # offloaded gradients are clipped on the CPU
            on_gpu = self.device.type == "cuda"
            use_one_thread()
            titan.init_distributed(
                titan.CommConfig(trace_buf_size=0), enable_cpu_backend=cpu_offload and on_gpu
            )
        self.dims = titan.ParallelDims.from_config(self.layout, world_size)
        if world_size > 1:
            self.dims.build_mesh()
        titan.set_determinism(
            self.dims, self.device, titan.DebugConfig(seed=seed), distinct_seed_mesh_dims=["pp"]
        )
        self._spmd_context = titan.get_spmd_context(parallel_dims=self.dims)

    def _mesh(self, name: str) -> DeviceMesh | None:
        return self.dims.get_optional_mesh(name) if self.world_size > 1 else None

    @property
    def dp_mesh(self) -> DeviceMesh | None:
        """The processes that hold different data; None when all hold the same."""
        return self._mesh("batch")

    @property
    def dp_size(self) -> int:
        return self.dims.dp_replicate * self.dims.dp_shard

    @property
    def dp_rank(self) -> int:
        return self.dp_mesh.get_local_rank() if self.dp_mesh is not None else 0

    @property
    def cp_mesh(self) -> DeviceMesh | None:
        """The processes that hold different tokens of the same streams."""
        return self._mesh("cp")

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The processes that share every layer."""
        return self._mesh("tp")

    @property
    def pp_mesh(self) -> DeviceMesh | None:
        """The processes that hold different layers; the last one of them has the head."""
        return self._mesh("pp")

    @property
    def has_head(self) -> bool:
        """Whether results appear on this process first."""
        return self.pp_mesh is None or self.pp_mesh.get_local_rank() == self.pp_mesh.size() - 1

    def from_head(self, value: T) -> T:
        """What the process with the head has, on every process of its pipeline (a collective)."""
        if self.pp_mesh is None:
            return value
        box = [value]
        dist.broadcast_object_list(
            box, group=self.pp_mesh.get_group(), group_src=self.pp_mesh.size() - 1, device=self.device
        )
        return box[0]

    def gather(self, value: T) -> list[T]:
        """The values of all data-parallel ranks, in their order (a collective)."""
        if self.dp_mesh is None:
            return [value]
        values = [value] * self.dp_size
        dist.all_gather_object(values, value, group=self.dp_mesh.get_group())
        return values

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """To be entered around every pass through the model."""
        with self._spmd_context():
            yield

    def close(self) -> None:
        """Leaves the other processes."""
        if self._owns_process_group:
            dist.destroy_process_group()


def _local_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    os.environ.setdefault("LOCAL_RANK", "0")
    device = titan.get_local_device()
    torch.cuda.set_device(device)
    return device
