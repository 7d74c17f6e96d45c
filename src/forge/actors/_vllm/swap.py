"""Swap: the next weights, built and packed beside those in use, and exchanged in an instant.

Where a CPU computes, a layer holds a packed copy of its weight (`cpu_linear`), which its
quantization method makes from its parameters. Here it is made on a shadow of the layer, while the layer
itself goes on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from forge.actors._vllm.load_plan import LoadPlan, ParameterPlan
from forge.actors._vllm.proof import check_parameter
from forge.actors._vllm.unprocessed import dressed, empty_like, unprocessed
from forge.weights import Box

_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@dataclass(frozen=True, slots=True)
class Swap:
    """The attributes that each layer gets; after `commit`, those that it had."""

    attributes: list[tuple[nn.Module, dict[str, Any]]]

    @classmethod
    def build(cls, model: nn.Module, plan: LoadPlan, tensors: Mapping[str, Tensor]) -> Self:
        """From the boxes of a version's tensors, `plan.boxes`; the model may run meanwhile.

        Raises WeightsMismatch where a parameter isn't what it was filled with.
        """
        made: dict[int, nn.Parameter] = {}  # by the one in use, which layers may share
        attributes = []
        for prefix, layer in list(model.named_modules()):
            if not any(parameter is not None for parameter in layer._parameters.values()):
                continue
            before = dict(layer.__dict__)
            shadow: nn.Module = object.__new__(type(layer))
            shadow.__dict__ = {**before, "_parameters": dict(layer._parameters)}
            view = None  # of what arrived, to be gone once it is packed
            for name, parameter in unprocessed(layer).items():
                live = layer._parameters[name]
                if id(live) not in made:
                    recipe = plan.parameters[f"{prefix}.{name}"]
                    if name == "weight" and _is_one_piece(layer, parameter, recipe, plan.boxes, tensors):
                        made[id(live)] = view = dressed(tensors[recipe.regions[0].name], parameter, layer)
                    else:
                        made[id(live)] = _copy(layer, parameter, recipe, plan.boxes, tensors)
                shadow._parameters[name] = made[id(live)]
            method: Any = getattr(layer, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(shadow)
            if view is not None and shadow._parameters["weight"] is view:  # vLLM computes with it as it is
                recipe = plan.parameters[f"{prefix}.weight"]
                copy = _copy(layer, view, recipe, plan.boxes, tensors)
                shadow._parameters["weight"] = made[id(layer._parameters["weight"])] = copy
            changed = {name: new for name, new in shadow.__dict__.items() if before.get(name) is not new}
            attributes.append((layer, changed))
        return cls(attributes)

    def commit(self) -> None:
        """Gives every layer its new attributes, between two steps, and takes the old ones."""
        for layer, attributes in self.attributes:
            old = {name: layer.__dict__.get(name) for name in attributes}
            layer.__dict__.update(attributes)
            attributes.update(old)


def can_swap(model: nn.Module, plan: LoadPlan) -> bool:
    """Whether all parameters are made of boxes, and all layers only hold parameters or packed copies."""
    return not plan.unproven and all(
        _is_plain(module) for module in model.modules() if next(module.parameters(), None) is not None
    )


def _is_plain(layer: nn.Module) -> bool:
    """Not those that derive something of their own from weights, also of a layer within (as MLA does)."""
    method = getattr(layer, "quant_method", None)
    return type(method) in _PLAIN if method else not hasattr(layer, "process_weights_after_loading")


def _is_one_piece(
    layer: nn.Module,
    parameter: Tensor,
    recipe: ParameterPlan,
    boxes: Mapping[str, Box],
    tensors: Mapping[str, Tensor],
) -> bool:
    """Whether a weight that will be packed is just what arrived."""
    first, *others = recipe.regions
    arrived = tensors[first.name]
    return (
        type(getattr(layer, "quant_method", None)) is UnquantizedLinearMethod
        and not others
        and first.target == Box.whole(parameter.shape)
        and first.source == boxes[first.name]
        and arrived.dtype == parameter.dtype
        and arrived.is_contiguous()
    )


def _copy(
    layer: nn.Module,
    parameter: Tensor,
    recipe: ParameterPlan,
    boxes: Mapping[str, Box],
    tensors: Mapping[str, Tensor],
) -> nn.Parameter:
    """A parameter with its values, compared with what arrived."""
    made = empty_like(parameter, layer, "cpu")
    for part in recipe.padding:
        made.data[part.target.slices].fill_(part.value)
    for region in recipe.regions:
        source = region.source.relative_to(boxes[region.name])
        made.data[region.target.slices].copy_(tensors[region.name][source.slices])
    check_parameter(made, recipe, boxes, tensors)
    return made
