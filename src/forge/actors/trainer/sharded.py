"""A model built from a Hugging Face folder, shared out over this job's processes and loaded."""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from forge.actors import _titan as titan
from forge.actors.trainer.checkpoint_files import load_weights
from forge.actors.trainer.layout import Layout, stream_of
from forge.actors.trainer.model import model_spec, read_hf_config
from forge.actors.trainer.options import ParallelismOptions, TrainingOptions
from forge.data_models import TrainInputs
from forge.errors import ForgeError

SPMD_BACKEND = "partial_dtensor"
"""The backend of torchtitan 0.3 that works with torch 2.13 on more than one process."""


class ShardedModel:
    """The model object that trainer and reference share, so that both compute the same numbers.

    In bfloat16 one process computes under autocast: weights, residual stream and norms stay float32, which
    brings log-probabilities 40 % closer to float32 than bfloat16 throughout, at the same speed. More than one
    process follow FSDP's mixed precision instead, which gathers bfloat16 weights.
    """

    def __init__(
        self,
        folder: Path,
        training: TrainingOptions,
        parallelism: ParallelismOptions,
        *,
        world_size: int = 1,
        trainable: bool = True,
        seed: int = 0,
    ) -> None:
        parallelism.check(world_size)
        self.folder = folder
        self.seq_len = training.seq_len
        self.dtype = titan.TORCH_DTYPE_MAP[training.dtype]
        self.device = _local_device()
        spec = model_spec(read_hf_config(folder), training.seq_len)
        layout = titan.ParallelismConfig(
            tensor_parallel_degree=parallelism.tensor_parallel_degree,
            data_parallel_shard_degree=parallelism.data_parallel_shard_degree,
            data_parallel_replicate_degree=parallelism.data_parallel_replicate_degree,
            enable_sequence_parallel=False,  # rows need not divide by the degree
            spmd_backend=SPMD_BACKEND,
        )
        titan.set_spmd_backend(SPMD_BACKEND)
        self._owns_process_group = world_size > 1 and not dist.is_initialized()
        if world_size > 1:
            titan.init_distributed(titan.CommConfig(trace_buf_size=0))
        self.dims = titan.ParallelDims.from_config(layout, world_size)
        if world_size > 1:
            self.dims.build_mesh()
        titan.set_determinism(
            self.dims, self.device, titan.DebugConfig(seed=seed), distinct_seed_mesh_dims=["pp"]
        )
        self._spmd_context = titan.get_spmd_context(parallel_dims=self.dims)
        self._autocast = world_size == 1 and self.dtype != torch.float32
        self.module = self._build(spec, layout, training)
        self.module.train(trainable).requires_grad_(trainable)
        assert spec.state_dict_adapter is not None
        self.adapter = spec.state_dict_adapter(spec.model, None)
        load_weights(self.hf_tensors(), folder)
        if self._autocast and not trainable:
            self._round_projections()

    def _build(
        self, spec: titan.ModelSpec, layout: titan.ParallelismConfig, training: TrainingOptions
    ) -> titan.Qwen3Model:
        spec.model.update_from_config(config=SimpleNamespace(parallelism=layout))
        with torch.device("meta"), titan.set_default_dtype(torch.float32):
            module = spec.model.build()
        parallelize = spec.parallelize_fn
        if self.dims.world_size == 1:  # nothing to shard: FSDP would only copy
            parallelize = partial(parallelize, skip_dp=True)
        module = parallelize(
            module,
            parallel_dims=self.dims,
            training=titan.TrainingConfig(
                seq_len=training.seq_len, mixed_precision_param=training.dtype, disable_cuda_graphs=True
            ),
            parallelism=layout,
            compile_config=titan.CompileConfig(),
            ac_config=None,
            dump_folder="",
        )
        if self.device.type == "cpu":  # gloo can't scale while it reduces; to scale by 1 is all that is asked
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.set_force_sum_reduction_for_comms(True)
        module.to_empty(device=self.device)
        with torch.no_grad():
            module.init_weights()  # the buffers; all weights are loaded over
        module._skip_lm_head = True  # logits are computed where they are asked for only
        return module

    def _round_projections(self) -> None:
        """Stores rounded what autocast would round in every pass: equal numbers in less time and memory."""
        for part in self.module.modules():
            if isinstance(part, titan.Linear):
                for name, value in part.named_parameters():
                    setattr(part, name, nn.Parameter(value.to(self.dtype), requires_grad=False))

    @property
    def dp_mesh(self) -> DeviceMesh | None:
        """The processes that hold different data; None when all hold the same."""
        return self.dims.get_optional_mesh("batch") if self.dims.world_size > 1 else None

    @property
    def dp_size(self) -> int:
        return self.dims.dp_replicate * self.dims.dp_shard

    @property
    def dp_rank(self) -> int:
        return self.dp_mesh.get_local_rank() if self.dp_mesh is not None else 0

    def hf_tensors(self) -> dict[str, Tensor]:
        """The live weights by their Hugging Face names, or this process's shards of them; tied ones once."""
        return self.adapter.to_hf(self.module.state_dict())

    def logits(self, inputs: TrainInputs, source_ids: Tensor) -> Tensor:
        """Logits [M, V] of the tokens that follow the cells `source_ids` [M] (row * L + column) of `inputs`.

        Tensors must be on `device`. Every process of the job must call it equally often.
        """
        longest = int(inputs.positions.max()) + 1
        if longest > self.seq_len:
            raise ForgeError(
                f"a prompt with its completion has {longest} tokens, training.seq_len is {self.seq_len}: "
                "raise it, or ask for shorter completions"
            )
        stream = stream_of(inputs)
        with self._computing():
            hidden = self.module(
                stream.tokens[None],
                positions=stream.positions[None],
                attention_masks=Layout(stream.row_ids, stream.segment_ids),
            )
            hidden = hidden.to_local() if isinstance(hidden, DTensor) else hidden
            chosen = hidden[0].index_select(0, stream.token_of_cell[source_ids])
            logits = self.module.lm_head(chosen[None])
            return (logits.full_tensor() if isinstance(logits, DTensor) else logits)[0]

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        with self._spmd_context(), torch.autocast(self.device.type, self.dtype, enabled=self._autocast):
            yield

    def close(self) -> None:
        """Leaves the job's other processes."""
        if self._owns_process_group:
            dist.destroy_process_group()


def _local_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    os.environ.setdefault("LOCAL_RANK", "0")
    device = titan.get_local_device()
    torch.cuda.set_device(device)
    return device
