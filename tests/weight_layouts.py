"""Models, and how their weights lie on ranks by torch.chunk alone: what tests hold forge.weights to.

Writers are trainers: data parallel replicas x FSDP shards x tensor parallel ranks, in pipeline stages. As
FSDP2 does it, the shard of each tensor parallel rank is what FSDP shards further. Readers want boxes, a set
for each rank.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from forge.weights.box import Box

NUM_LAYERS = 2


@dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    split: int | None  # the dimension that tensor parallel ranks share; None: each has all of it
    stage: float  # where in the depth of the model, in [0, 1)

    def random(self, seed: int) -> Tensor:
        """Any bits, also those of NaNs; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        return (
            torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
            .view(self.dtype)
            .view(self.shape)
        )


Model = Mapping[str, Weight]


def tensors_of(model: Model, seed: int = 0) -> dict[str, Tensor]:
    return {name: weight.random(seed + i) for i, (name, weight) in enumerate(model.items())}


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Checkpoints of either family, tied or not, of shapes that no number of ranks need divide."""
    family = draw(st.sampled_from(["llama", "llama tied", "qwen3", "qwen3 tied"]))
    hidden, query, key, inner = (draw(st.integers(1, 24)) for _ in range(4))
    vocab, head = draw(st.integers(1, 70)), draw(st.integers(1, 9))
    dtypes = st.sampled_from([torch.bfloat16, torch.float32])
    model: dict[str, Weight] = {}

    def add(name: str, shape: tuple[int, ...], split: int | None, layer: int) -> None:
        stage = (layer + 1) / (NUM_LAYERS + 2)
        model[f"{name}.weight"] = Weight(shape, draw(dtypes), split, stage)

    add("model.embed_tokens", (vocab, hidden), 0, -1)
    for i in range(NUM_LAYERS):
        layer = f"model.layers.{i}"
        add(f"{layer}.self_attn.q_proj", (query, hidden), 0, i)
        add(f"{layer}.self_attn.k_proj", (key, hidden), 0, i)
        add(f"{layer}.self_attn.v_proj", (key, hidden), 0, i)
        add(f"{layer}.self_attn.o_proj", (hidden, query), 1, i)
        if family.startswith("qwen3"):
            add(f"{layer}.self_attn.q_norm", (head,), None, i)
            add(f"{layer}.self_attn.k_norm", (head,), None, i)
        add(f"{layer}.mlp.gate_proj", (inner, hidden), 0, i)
        add(f"{layer}.mlp.up_proj", (inner, hidden), 0, i)
        add(f"{layer}.mlp.down_proj", (hidden, inner), 1, i)
        add(f"{layer}.input_layernorm", (hidden,), None, i)
        add(f"{layer}.post_attention_layernorm", (hidden,), None, i)
    add("model.norm", (hidden,), None, NUM_LAYERS)
    if "tied" not in family:
        add("lm_head", (vocab, hidden), 0, NUM_LAYERS)
    return model


@dataclass(frozen=True)
class Trainer:
    """Degrees of parallelism, in the order of torchtitan's mesh. All 1: plain tensors."""

    stages: int = 1
    replicas: int = 1
    shards: int = 1
    tensor: int = 1

    @property
    def degrees(self) -> tuple[int, ...]:
        """Of the mesh of one stage."""
        return tuple(n for n in (self.replicas, self.shards, self.tensor) if n > 1)

    @property
    def world_size(self) -> int:
        return self.stages * math.prod(self.degrees)

    def mesh(self, rank: int) -> DeviceMesh | None:
        """That of the rank's stage, without processes; None where the stage is one rank."""
        per_stage = math.prod(self.degrees)
        if per_stage == 1:
            return None
        ranks = torch.arange(per_stage).view(self.degrees) + rank // per_stage * per_stage
        return DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)

    def names(self, model: Model, rank: int) -> list[str]:
        """Of the tensors that the rank's stage holds."""
        stage = rank // math.prod(self.degrees)
        return [name for name, weight in model.items() if int(weight.stage * self.stages) == stage]

    def placements(self, weight: Weight) -> list[Placement]:
        """As FSDP2 over tensor parallelism names them, one for each dimension of `mesh`."""
        places: list[Placement] = [Replicate()] if self.replicas > 1 else []
        if self.shards > 1:
            strided = self.tensor > 1 and weight.split == 0
            places.append(_StridedShard(0, split_factor=self.tensor) if strided else Shard(0))
        if self.tensor > 1:
            places.append(Replicate() if weight.split is None else Shard(weight.split))
        return places

    def local(self, whole: Tensor, weight: Weight, rank: int) -> Tensor:
        """What the rank holds of a tensor of its stage."""
        tensor_rank, shard_rank = rank % self.tensor, rank // self.tensor % self.shards
        mine = whole if weight.split is None else chunk(whole, self.tensor, tensor_rank, weight.split)
        return chunk(mine, self.shards, shard_rank, 0)

    def tensors(self, model: Model, wholes: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """What the rank publishes."""
        mesh = self.mesh(rank)
        held = {name: self.local(wholes[name], model[name], rank) for name in self.names(model, rank)}
        if mesh is None:
            return held
        return {
            name: DTensor.from_local(
                local,
                mesh,
                self.placements(model[name]),
                run_check=False,
                shape=wholes[name].shape,
                stride=wholes[name].stride(),
            )
            for name, local in held.items()
        }


TRAINERS = [
    Trainer(),
    *(Trainer(shards=n) for n in (2, 3, 4)),
    *(Trainer(tensor=n) for n in (2, 3, 4)),
    Trainer(shards=2, tensor=2),
    Trainer(shards=3, tensor=2),
    Trainer(shards=2, tensor=4),
    Trainer(replicas=2, shards=2),
    Trainer(replicas=2, shards=2, tensor=2),
    Trainer(stages=2),
    Trainer(stages=2, shards=2),
    Trainer(stages=3, shards=2, tensor=2),
    Trainer(stages=2, tensor=2),
]


@dataclass(frozen=True)
class Generator:
    """Readers that hold the model together: `tensor` ranks, the shards of each cut into `rows` more.

    copies: how many ranks in a row hold the same of k_proj and v_proj, as where there are few heads for them.
    """

    tensor: int = 1
    rows: int = 1
    copies: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.rows

    def boxes(self, model: Model, rank: int) -> dict[str, Box]:
        """Without those of which the rank gets nothing."""
        boxes = {name: self._box(name, weight, rank) for name, weight in model.items()}
        return {name: box for name, box in boxes.items() if box.numel}

    def _box(self, name: str, weight: Weight, rank: int) -> Box:
        ranks, index = self.tensor, rank // self.rows
        if ".k_proj" in name or ".v_proj" in name:
            ranks, index = ranks // self.copies, index // self.copies
        # numbers of rows and columns, cut as the tensor is
        indices = torch.meshgrid(*map(torch.arange, weight.shape), indexing="ij")
        for_dims = [
            part if weight.split is None else chunk(part, ranks, index, weight.split) for part in indices
        ]
        for_dims = [chunk(part, self.rows, rank % self.rows, 0) for part in for_dims]
        if not for_dims[0].numel():
            return Box((0,) * len(weight.shape), (0,) * len(weight.shape))
        return Box(tuple(int(part.min()) for part in for_dims), tuple(for_dims[0].shape))


GENERATORS = [
    Generator(),
    *(Generator(tensor=n) for n in (2, 3, 4)),
    Generator(tensor=4, copies=2),
    Generator(tensor=4, copies=4),
    *(Generator(rows=n) for n in (2, 3)),
    Generator(tensor=2, rows=3),
]


def chunk(tensor: Tensor, num: int, index: int, dim: int) -> Tensor:
    """As torch.chunk, with empty chunks where it gives fewer than `num`."""
    chunks = tensor.chunk(num, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def same_bits(a: Tensor, b: Tensor) -> bool:
    as_bytes = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)
