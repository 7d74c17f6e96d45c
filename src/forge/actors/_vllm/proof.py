"""Proof that a parameter holds, bit for bit, what was fetched for it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from forge.actors._vllm.load_plan import ParameterPlan
from forge.errors import WeightsMismatch
from forge.weights import Box


def check_parameter(
    parameter: Tensor, recipe: ParameterPlan, boxes: Mapping[str, Box], tensors: Mapping[str, Tensor]
) -> None:
    """Raises WeightsMismatch, naming the tensor, unless each region is the fetched one after a cast.

    boxes: which part of each tensor `tensors` holds. The comparison is on the parameter's device.
    """
    for region in recipe.regions:
        source = region.source.relative_to(boxes[region.name])
        fetched = tensors[region.name][source.slices].to(parameter.device, parameter.dtype)
        if not _same_bits(parameter.data[region.target.slices], fetched):
            raise WeightsMismatch(f"{region.name} was not loaded as it arrived")
    for part in recipe.padding:
        if not bool((parameter.data[part.target.slices] == part.value).all()):
            raise WeightsMismatch("the padding of a parameter was not loaded as it must be")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Also where both hold NaN."""
    lane = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(lane), b.contiguous().view(lane))
