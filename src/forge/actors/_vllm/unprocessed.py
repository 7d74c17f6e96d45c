"""Parameters in the form that vLLM's loaders fill, from before it packed or quantized them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs


def unprocessed(layer: nn.Module) -> dict[str, Tensor]:
    """A layer's own parameters by name, as they were when it was built: what counts is all but the values.

    vLLM keeps their shapes and loaders for its own reloads, but not those of biases, which it never changes.
    """
    kept, _ = get_layerwise_info(layer).restore_metadata
    live = {name: parameter for name, parameter in layer._parameters.items() if parameter is not None}
    return live | {name: tensor for name, tensor in kept.items() if name not in SKIP_TENSORS}


def reshaped(model: nn.Module) -> dict[str, str]:
    """By qualified names, how vLLM keeps the parameters that it quantized, turned or packed after loading."""
    found = {}
    for prefix, layer in model.named_modules():
        for name, parameter in unprocessed(layer).items():
            live = layer._parameters.get(name)
            if live is None or _form(live) != _form(parameter):
                form = "nowhere" if live is None else f"as {live.dtype} {tuple(live.shape)}"
                found[f"{prefix}.{name}" if prefix else name] = f"the engine keeps it {form}, for speed"
    return found


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return tensor.dtype, tensor.shape, tensor.stride()


def empty_like(parameter: Tensor, layer: nn.Module, device: str) -> nn.Parameter:
    """Uninitialized memory of the parameter's shape, dtype, class, loader and other attributes."""
    return dressed(torch.empty(parameter.shape, dtype=parameter.dtype, device=device), parameter, layer)


def dressed(tensor: Tensor, parameter: Tensor, layer: nn.Module) -> nn.Parameter:
    """`tensor` with the class and attributes of a parameter of `layer`."""
    made: Any = nn.Parameter(tensor, requires_grad=False)
    made.__class__ = parameter.__class__
    made.__dict__ = parameter.__dict__.copy()
    restore_layer_refs(made, layer)
    return made


@contextmanager
def on_meta(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Inside, the model has unprocessed parameters without memory, whose qualified names this gives.

    Layers that share a parameter share it here too: it has the name of the first. The model must not run.
    """
    found: dict[str, nn.Parameter] = {}
    shared: dict[int, nn.Parameter] = {}
    held = {layer: layer._parameters for layer in model.modules()}
    try:
        for prefix, layer in list(model.named_modules()):
            parameters: dict[str, nn.Parameter | None] = dict(layer._parameters)
            for name, parameter in unprocessed(layer).items():
                live = layer._parameters.get(name)
                known = shared.get(id(live)) if live is not None else None
                if known is None:
                    known = empty_like(parameter, layer, "meta")
                    found[f"{prefix}.{name}" if prefix else name] = known
                    if live is not None:
                        shared[id(live)] = known
                parameters[name] = known
            layer._parameters = parameters
        yield found
    finally:
        for layer, parameters in held.items():
            layer._parameters = parameters
