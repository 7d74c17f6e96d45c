"""Which model is to be built, and where its weights come from."""

import hashlib
import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from forge.actors.trainer.checkpoint_files import fill, load_weights, save_companions
from forge.actors.trainer.flavors import check_agreement, flavor_config
from forge.actors.trainer.hf_config import read_hf_config
from forge.actors.trainer.options import ModelOptions
from forge.data import assets

logger = logging.getLogger(__name__)

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's config and the folder that holds its weights."""

    config: PretrainedConfig
    folder: Path | None  # None: random weights
    uri: str | None = None  # where the folder was fetched from

    @property
    def name(self) -> str | None:
        """What others find the model by: its name on the hub, else its folder."""
        if self.uri is not None and self.uri.startswith("hf://"):
            return self.uri.removeprefix("hf://").partition("@")[0]
        return str(self.folder) if self.folder is not None else None

    def fingerprint(self, seed: int) -> str:
        """What tells these weights from others of the same shapes, by some of their bytes; seed: of random
        ones."""
        digest = hashlib.sha256(str(seed if self.folder is None else "").encode())
        for path in sorted(self.folder.glob("*.safetensors")) if self.folder is not None else ():
            size = path.stat().st_size
            with path.open("rb") as file:
                for i in range(_NUM_SAMPLES):
                    file.seek(size * i // _NUM_SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:16]

    def load(self, tensors: Mapping[str, Tensor], seed: int) -> None:
        """Fills tensors, by their Hugging Face names, or this process's shards of them; those on the meta
        device are only checked.

        Raises AssetError naming the first tensor that the folder does not have as the model needs it.
        """
        if self.folder is not None:
            load_weights(tensors, self.folder)
            return
        logger.warning("no hf_assets_path: the weights are random, drawn from seed %d", seed)
        for name, tensor in tensors.items():
            if tensor.device.type != "meta":
                fill(tensor, _draw(name, tensor, self.config.initializer_range, seed))

    def save_companions(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes what belongs beside exported weights of `dtype`: config.json, and the tokenizer if any."""
        if self.folder is not None:
            save_companions(self.folder, folder, dtype)
            return
        config = type(self.config)(**{**self.config.to_dict(), "dtype": dtype})
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        config.save_pretrained(folder)


def resolve_model(options: ModelOptions) -> ModelSource:
    """Fetches the folder if there is one. Raises ConfigError where it does not agree with the flavor."""
    if options.hf_assets_path is None:
        assert options.name is not None and options.flavor is not None  # ModelOptions checks it
        return ModelSource(flavor_config(options.name, options.flavor), None)
    folder = assets.fetch(options.hf_assets_path)
    config = read_hf_config(folder)
    if options.name is not None and options.flavor is not None:
        check_agreement(config, options.name, options.flavor, f"{folder}/config.json")
    return ModelSource(config, folder, options.hf_assets_path)


def _draw(name: str, like: Tensor, std: float, seed: int) -> Tensor:
    """The whole of one random tensor, the same under every parallel layout: normal for matrices, else 1, or 0
    for biases."""
    device = like.to_local().device if isinstance(like, DTensor) else like.device
    if like.dim() == 1:
        return torch.full(like.shape, float(not name.endswith("bias")), device=device)
    generator = generator_for(name, device, seed)
    return torch.empty(like.shape, device=device).normal_(0.0, std, generator=generator)


def generator_for(name: str, device: torch.device, seed: int) -> torch.Generator:
    """What a tensor of this name is drawn from: the same whatever else is drawn, and where."""
    # the CPU's generator reads 32 bits of a seed
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
