"""A generator beside transformers' model of the same folder, for the tests of the generator."""

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from forge.controller import ActorHandle, Service
from forge.data_models import Completion
from forge.weights import publish, retire

MAX_MODEL_LEN = 960
PROMPT = "What is 7 + 8? "
Weights = dict[str, Tensor]
_versions = itertools.count(1)


def engine_config(folder: Path) -> dict[str, Any]:
    return {"model": str(folder), "dtype": "float32", "max_model_len": MAX_MODEL_LEN}


class Model:
    """A started generator beside transformers' model of the same folder."""

    def __init__(self, generator: Service | ActorHandle, folder: Path) -> None:
        self.generator = generator
        self.reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.original = {name: p.detach().clone() for name, p in self.reference.named_parameters()}
        self.tokenizer_file = folder / "tokenizer.json"

    def changed(self, seed: int, scale: float = 0.2) -> Weights:
        """Other weights of the same shapes."""
        noise = torch.Generator().manual_seed(seed)
        return {n: p * (1 + scale * torch.randn(p.shape, generator=noise)) for n, p in self.original.items()}

    @torch.no_grad()
    def logprobs(self, completion: Completion, weights: Weights) -> Tensor:
        """What transformers, with these weights, says about the completion's tokens."""
        self.reference.load_state_dict(weights, strict=False)
        self.reference.tie_weights()
        assert completion.prompt_ids is not None
        ids = torch.cat([completion.prompt_ids, completion.token_ids])
        logits = self.reference(ids[None]).logits[0, len(completion.prompt_ids) - 1 : -1]
        scaled = torch.log_softmax(logits / completion.temperature, -1)
        return scaled.gather(1, completion.token_ids[:, None])[:, 0]

    def gap(self, completions: list[Completion], weights: Weights) -> float:
        """The largest difference between the generator's log-probabilities and transformers'."""
        return max(float((c.logprobs - self.logprobs(c, weights)).abs().max()) for c in completions)

    async def update(self, weights: Weights) -> int:
        """Publishes the weights, has every replica load them, and retires them."""
        version = next(_versions)
        await publish(version, weights, rank=0, world_size=1)
        try:
            assert set(await self.generator.update_weights.fanout(version)) == {version}
        finally:
            await retire(version)
        return version
