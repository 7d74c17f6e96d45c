"""A generator beside transformers' model of the same folder, for the tests of the generator."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from forge.controller import ActorHandle, Service
from forge.data_models import Completion
from forge.weights import open_store, publish, retire

MAX_MODEL_LEN = 960
BATCH = 64
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

    def logprobs(self, completion: Completion, weights: Weights) -> Tensor:
        """What transformers, with these weights, says about the completion's tokens."""
        return self.all_logprobs([completion], weights)[0]

    @torch.no_grad()
    def all_logprobs(self, completions: list[Completion], weights: Weights) -> list[Tensor]:
        """`logprobs` of each, many in one forward: what is padded on the right is seen by no token."""
        self.reference.load_state_dict(weights, strict=False)
        self.reference.tie_weights()
        found: list[Tensor] = []
        for first in range(0, len(completions), BATCH):
            batch = completions[first : first + BATCH]
            rows = [torch.cat([c.prompt_ids, c.token_ids]) for c in batch if c.prompt_ids is not None]
            logits = self.reference(pad_sequence(rows, batch_first=True)).logits
            for completion, row, row_logits in zip(batch, rows, logits, strict=True):
                last = row_logits[: len(row) - 1][-len(completion.token_ids) :]
                scaled = torch.log_softmax(last / completion.temperature, -1)
                found.append(scaled.gather(1, completion.token_ids[:, None])[:, 0])
        return found

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


async def publish_some(folder: Path) -> dict[int, Weights]:
    """Versions of a model before there is a generator: two that are complete, and a newer one of which one
    rank of two has published its part."""
    await open_store()
    model = Model(None, folder)  # type: ignore[arg-type]
    weights = {next(_versions): model.changed(seed) for seed in (901, 902, 903)}
    for version, world_size in zip(weights, (1, 1, 2), strict=True):
        await publish(version, weights[version], rank=0, world_size=world_size)
    return weights


async def check_it_began_with_the_newest(model: Model, published: dict[int, Weights]) -> None:
    """That a generator started after `publish_some` has the second of these, and what it makes of others."""
    old, newest, _ = published
    assert await model.generator.version.route() == newest
    completions = await model.generator.generate.route(PROMPT)
    assert {c.generator_version for c in completions} == {newest}
    assert model.gap(completions, published[newest]) < 1e-4
    assert await model.generator.update_weights.route(old) == newest, "it does not go back"
    assert await model.generator.update_weights.route(newest) == newest
    await asyncio.gather(*map(retire, published))
    assert await model.generator.update_weights.route(newest) == newest, "what it holds it needs not fetch"
    assert model.gap(await model.generator.generate.route(PROMPT), published[newest]) < 1e-4
