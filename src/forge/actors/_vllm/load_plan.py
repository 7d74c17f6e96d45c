"""LoadPlan: which elements of the checkpoint's tensors go where in one rank's parameters.

vLLM's own loaders know it: they cut, fuse, replicate and pad. Here they run once on tensors without memory,
and what they copy is written down.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge.actors._vllm.unprocessed import on_meta
from forge.weights.box import Box, why_not_tiled

logger = logging.getLogger(__name__)

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of a parameter, and those of the checkpoint's tensor `name` that are copied there."""

    target: Box
    name: str
    source: Box


@dataclass(frozen=True, slots=True)
class Padding:
    """Elements of a parameter that have a value of their own."""

    target: Box
    value: float


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """A parameter as the loaders fill it; together, regions and padding are all of its elements, once."""

    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    padding: tuple[Padding, ...]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What one rank's loaders do, by qualified names of the parameters.

    boxes: what they read of the checkpoint's tensors, a whole tensor where they compute with it; unproven:
    why it isn't known what some parameters must hold.
    """

    parameters: dict[str, ParameterPlan]
    boxes: dict[str, Box]
    unproven: dict[str, str]

    @classmethod
    def of(cls, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> "LoadPlan":
        """Of this rank's part of a vLLM model, which must not run meanwhile; shapes: the checkpoint's."""
        sources = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        with on_meta(model) as parameters, _Recorder(sources, parameters) as recorder:
            try:
                model.load_weights(iter(sources.items()))
            except (RuntimeError, NotImplementedError) as error:  # its loaders look at values
                logger.warning("vLLM's loaders don't tell what they do: %s", error)
                return cls(
                    {}, _whole(shapes), dict.fromkeys(parameters, f"the loaders need values ({error})")
                )
        return recorder.plan()

    def without(self, unproven: Mapping[str, str]) -> "LoadPlan":
        """The same but for parameters, with the reasons, that can't be compared with what they must hold."""
        told = {name: why for name, why in unproven.items() if name in self.parameters}
        kept = {name: plan for name, plan in self.parameters.items() if name not in told}
        return replace(self, parameters=kept, unproven=self.unproven | told)


def whole_where_untiled(
    boxes: Iterable[Mapping[str, Box]], shapes: Mapping[str, tuple[int, ...]]
) -> set[str]:
    """The tensors that ranks must fetch whole, since their boxes don't tile them and so prove nothing."""
    by_name: dict[str, set[Box]] = defaultdict(set)
    for of_rank in boxes:
        for name, box in of_rank.items():
            by_name[name].add(box)
    return {name for name, found in by_name.items() if why_not_tiled(found, shapes[name])}


class _Recorder(TorchDispatchMode):
    """Writes down each copy from a source to a parameter."""

    def __init__(self, sources: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._sources = {_storage(tensor): (name, tensor) for name, tensor in sources.items()}
        self._parameters = {_storage(tensor): (name, tensor) for name, tensor in parameters.items()}
        self._regions: dict[str, dict[Box, Region]] = defaultdict(dict)
        self._padding: dict[str, dict[Box, Padding]] = defaultdict(dict)
        self._read_whole: set[str] = set()
        self._unproven: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _aten.copy_.default and _storage(args[0]) in self._parameters:
            self._copy(args[0], args[1])
        elif func in (_aten.fill_.Scalar, _aten.zero_.default) and _storage(args[0]) in self._parameters:
            self._fill(args[0], float(args[1]) if len(args) > 1 else 0.0)
        else:
            self._other(func, args, kwargs, result)
        return result

    def plan(self) -> LoadPlan:
        plans = {
            name: ParameterPlan(
                tuple(tensor.shape),
                tuple(self._regions[name].values()),
                tuple(self._padding[name].values()),
            )
            for name, tensor in self._parameters.values()
        }
        for name, plan in plans.items():
            filled = [part.target for part in (*plan.regions, *plan.padding)]
            if wrong := why_not_tiled(filled, plan.shape):
                self._unproven.setdefault(name, f"the loaders fill: {wrong}")
        shapes = {name: tuple(tensor.shape) for name, tensor in self._sources.values()}
        read: dict[str, list[Box]] = defaultdict(list)
        for plan in plans.values():
            for region in plan.regions:
                read[region.name].append(region.source)
        boxes = {name: _around(found) for name, found in read.items()}
        boxes |= _whole({name: shapes[name] for name in self._read_whole})
        return LoadPlan(
            {name: plan for name, plan in plans.items() if name not in self._unproven}, boxes, self._unproven
        )

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if target.numel() == 0:
            return
        parameter, whole_target = self._parameters[_storage(target)]
        found = self._sources.get(_storage(source))
        if found is None:
            self._unproven[parameter] = "the loaders compute it"
            return
        name, whole_source = found
        target_box, source_box = _box_in(target, whole_target), _box_in(source, whole_source)
        if target_box is None or source_box is None or target_box.shape != source_box.shape:
            self._read_whole.add(name)
            self._unproven[parameter] = f"the loaders rearrange {name}"
        else:
            self._regions[parameter][target_box] = Region(target_box, name, source_box)
            self._padding[parameter].pop(target_box, None)

    def _fill(self, target: Tensor, value: float) -> None:
        if target.numel() == 0:
            return
        parameter, whole = self._parameters[_storage(target)]
        box = _box_in(target, whole)
        if box is None:
            self._unproven[parameter] = "the loaders fill a part of it that isn't a box"
        else:
            self._padding[parameter][box] = Padding(box, value)
            self._regions[parameter].pop(box, None)

    def _other(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Views are followed by their storage; what else is made of a source, or changes one, isn't."""
        made = {_storage(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                storage = _storage(leaf)
                if storage in self._sources and made - {storage}:
                    self._read_whole.add(self._sources[storage][0])
                if storage in self._parameters and func._schema.is_mutable:
                    self._unproven[self._parameters[storage][0]] = f"the loaders change it ({func})"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _whole(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Box]:
    return {name: Box.whole(shape) for name, shape in shapes.items()}


def _around(boxes: list[Box]) -> Box:
    """The smallest box that holds them all."""
    offsets = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    stops = tuple(map(max, zip(*(box.stops for box in boxes), strict=True)))
    return Box(offsets, tuple(stop - offset for offset, stop in zip(offsets, stops, strict=True)))


def _box_in(view: Tensor, whole: Tensor) -> Box | None:
    """Which box of a contiguous tensor a view of it is; None where it is none."""
    if view.dim() != whole.dim():
        return None
    offsets, rest = [], int(view.storage_offset())
    for size, stride, whole_stride in zip(view.shape, view.stride(), map(int, whole.stride()), strict=True):
        if size > 1 and stride != whole_stride:
            return None
        offset, rest = divmod(rest, whole_stride)
        offsets.append(offset)
    box = Box(tuple(offsets), tuple(view.shape))
    return box if box.is_inside(Box.whole(whole.shape)) else None
