"""What a version of the weights must hold, learned from the model's folder."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from forge.data.assets import weight_files
from forge.errors import WeightsMismatch
from forge.weights import TensorFacts

_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_COMPUTED = "rotary_emb.inv_freq"  # old checkpoints hold it, no engine loads it


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all weights in a model folder, from the headers of its safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return {name: shape for name, shape in shapes.items() if not name.endswith(_COMPUTED)}


def check_weights(
    published: Mapping[str, TensorFacts], expected: Mapping[str, tuple[int, ...]], *, tied: bool
) -> None:
    """WeightsMismatch, naming the tensor, unless exactly the expected tensors are there, in their shapes.

    tied: input and output embeddings are one tensor in the engine. The output's may then be absent on either
    side, but where it is there it must equal the input's.
    """
    optional = {_HEAD} if tied else set()
    missing = sorted(expected.keys() - published.keys() - optional)
    unknown = sorted(published.keys() - expected.keys() - optional)
    if missing or unknown:
        parts = [f"{missing[0]} is missing"] if missing else []
        parts += [f"{unknown[0]} is not in the model"] if unknown else []
        raise WeightsMismatch(
            f"{' and '.join(parts)} ({len(missing)} missing and {len(unknown)} unknown of {len(expected)}): "
            "publish the names of the model's Hugging Face checkpoint"
        )
    for name, facts in published.items():
        if name in expected and facts.shape != expected[name]:
            raise WeightsMismatch(
                f"{name} has shape {facts.shape}, the model's has {expected[name]}: is it another model's?"
            )
    if tied and _HEAD in published:
        embedding = next(facts for name, facts in published.items() if name.endswith(_EMBEDDING))
        if published[_HEAD] != embedding:
            raise WeightsMismatch(
                f"{_HEAD} differs from {_EMBEDDING}, but the model ties them: train them as one tensor"
            )
