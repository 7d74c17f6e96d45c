"""The parts of a model that one process holds: built, cut and sharded by torchtitan, without weights."""

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from forge.actors import _titan as titan
from forge.actors.trainer.job import Job
from forge.actors.trainer.layout import Layout
from forge.actors.trainer.options import TrainingOptions


def build_whole(spec: titan.ModelSpec, job: Job) -> nn.Module:
    """The whole model on the meta device: no memory, but every name and shape."""
    spec.model.update_from_config(config=SimpleNamespace(parallelism=job.layout))
    with torch.device("meta"), titan.set_default_dtype(torch.float32):
        return spec.model.build()


def build_parts(
    whole: nn.Module, spec: titan.ModelSpec, job: Job, training: TrainingOptions
) -> list[nn.Module]:
    """What this process holds of it, on its device: one part, or one for each of its pipeline stages.

    A part takes `positions`, `row_ids` and `segment_ids` beside its tokens or hidden states [1, S, D], and
    gives hidden states; the head is called on those that are asked about only.
    """
    assert training.dtype != "auto"
    parallelize = spec.parallelize_fn
    if job.world_size == 1:  # nothing to shard: FSDP would only copy
        parallelize = partial(parallelize, skip_dp=True)
    settings: dict[str, Any] = {
        "parallel_dims": job.dims,
        "training": titan.TrainingConfig(
            seq_len=training.seq_len,
            local_batch_size=job.num_stages,
            mixed_precision_param=training.dtype,
            enable_cpu_offload=_offloads(training, job),
            disable_cuda_graphs=True,
        ),
        "parallelism": _with_balanced_stages(job, len([*whole.get_submodule("layers").children()])),
        "compile_config": titan.CompileConfig(),
        "ac_config": _checkpointing(training),
        "dump_folder": "",
    }
    if job.pp_mesh is None:
        parts = [parallelize(whole, **settings)]
    else:
        _, parts, _, _ = titan.pipeline_llm(
            whole,
            **settings,
            device=job.device,
            model_config=spec.model,
            parallelize_fn=parallelize,
            # of the schedule, which is left: see forge.actors.trainer.pipeline
            loss_fn=None,  # pyright: ignore[reportArgumentType]
        )
    for part in parts:
        _make_ready(part, job, offload=_offloads(training, job))
        if training.compile:  # torchtitan's own takes no break in a layer, and its attention is one
            for layer in part.get_submodule("layers").children():
                layer.compile()
    return parts


def _with_balanced_stages(job: Job, num_layers: int) -> titan.ParallelismConfig:
    """Embedding and head count as a layer each, where every stage of a pipeline still gets a layer."""
    weight = int((num_layers + 2) // job.num_stages >= 2)
    return dataclasses.replace(
        job.layout,
        pipeline_parallel_first_stage_less_layers=weight,
        pipeline_parallel_last_stage_less_layers=weight,
    )


def _offloads(training: TrainingOptions, job: Job) -> bool:
    """On CPUs everything is in host memory."""
    return training.cpu_offload and job.device.type != "cpu"


def _checkpointing(training: TrainingOptions) -> Any:
    match training.activation_checkpoint:
        case "none":
            return None
        case "selective":
            return titan.SelectiveAC.Config()
        case "full":
            return titan.FullAC.Config()


def _make_ready(part: nn.Module, job: Job, *, offload: bool) -> None:
    """Memory for the weights, the buffers' values, and what passes in and out."""
    if job.device.type == "cpu":  # gloo can't scale while it reduces; to scale by 1 is all that is asked
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    part.to_empty(device="cpu" if offload else job.device)
    with torch.no_grad():  # buffers only, and ties: weights are loaded later
        part.init_weights(buffer_device=job.device if offload else None)  # pyright: ignore[reportCallIssue]
    part._skip_lm_head = True  # pyright: ignore[reportArgumentType]
    part.register_forward_pre_hook(partial(_lay_out, job), with_kwargs=True)
    part.register_forward_hook(_to_plain)


def _lay_out(
    job: Job, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pipelines cut and send plain tensors only: what attends to what is worked out in each part."""
    [given] = args
    row_ids, segment_ids = kwargs.pop("row_ids")[0], kwargs.pop("segment_ids")[0]
    queries = None
    if job.cp_mesh is not None:
        length = given.shape[1]
        start = job.cp_mesh.get_local_rank() * length
        queries = slice(start, start + length)
    if given.is_floating_point() and job.tp_mesh is not None:
        given = _replicated(given, job.tp_mesh)
    layout = Layout(row_ids, segment_ids, queries)
    if given.device.type == "cuda":
        _ = layout.block_mask  # worked out here, not within the first layer, which may be compiled
    return (given,), {**kwargs, "attention_masks": layout}


def _replicated(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)


def _to_plain(part: nn.Module, args: tuple[Any, ...], hidden: Tensor) -> Tensor:
    return hidden.to_local() if isinstance(hidden, DTensor) else hidden
