"""Batches, losses and starters that tests of the trainer share."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.actors.reference_model import ReferenceModel
from forge.actors.trainer import TitanTrainer
from forge.data_models import Completion, TrainInputs, TrainTargets
from forge.rl.collate import pack_completions

TEMPERATURE = 0.7
Result = tuple[Tensor, dict[str, Tensor]]


class WeightedLogprobs:
    """- mean over sequences of advantage * log-probabilities: every token's gradient counts."""

    def __call__(
        self,
        logits: Tensor,
        target_ids: Tensor,
        advantages: Tensor,
        generator_logprobs: Tensor,
        loss_mask: Tensor,
        ref_logprobs: Tensor | None = None,
    ) -> Result:
        logprobs = torch.log_softmax(logits, -1).gather(-1, target_ids[..., None])[..., 0]
        return self.from_logprobs(logprobs, logprobs, advantages, generator_logprobs, loss_mask)

    def from_logprobs(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        advantages: Tensor,
        generator_logprobs: Tensor,
        loss_mask: Tensor,
        ref_logprobs: Tensor | None = None,
    ) -> Result:
        weights = advantages if advantages.dim() == 2 else advantages[:, None]
        sums = (logprobs * weights * loss_mask).sum(-1)
        longest = loss_mask.sum(-1).max().float()
        return -sums.sum() / loss_mask.any(-1).sum(), {"length_max": longest}


class FromLogits:
    """The same loss without its short cut."""

    def __init__(self) -> None:
        self.loss = WeightedLogprobs()

    def __call__(self, *args: Tensor) -> Result:
        return self.loss(*args)


class MeanOverTokens(FromLogits):
    """Averages over tokens instead."""

    normalize_by = "tokens"

    def __call__(self, *args: Tensor) -> Result:
        loss, metrics = self.loss(*args)
        loss_mask = args[4]
        return loss * loss_mask.any(-1).sum() / loss_mask.sum(), metrics


class InfiniteSlope(WeightedLogprobs):
    """A finite loss with an infinite gradient."""

    def from_logprobs(self, *args: Tensor) -> Result:
        loss, metrics = super().from_logprobs(*args)
        return (loss - loss.detach()).abs().sqrt(), metrics


def completion_groups(
    seed: int = 0, lengths: tuple[tuple[int, ...], ...] = ((3, 7, 1), (5,), (2, 9))
) -> list[list[Completion]]:
    """Random completions of the given lengths, one tuple a prompt; prompts of 4, 7, 10, ... tokens."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(n: int) -> Tensor:
        return torch.randint(5, 512, (n,), generator=generator)

    groups = []
    for i, group in enumerate(lengths):
        prompt = tokens(4 + 3 * i)
        groups.append(
            [
                Completion("", tokens(n), torch.full((n,), -6.0), prompt_ids=prompt, temperature=TEMPERATURE)
                for n in group
            ]
        )
    return groups


def batch_of(groups: list[list[Completion]], first: int = 0) -> tuple[TrainInputs, TrainTargets]:
    """Packed, with advantages that depend on an episode's number, counted from `first`."""
    inputs, targets = pack_completions(groups)
    numbers = torch.arange(first, first + len(targets.target_ids))
    return inputs, dataclasses.replace(
        targets,
        advantages=torch.cos(2.0 * numbers),
        episode_ids=[f"episode-{i}" for i in numbers.tolist()],
    )


async def start_trainer(folder: Path, loss: Any, **sections: Mapping[str, Any]) -> TitanTrainer:
    """In float32 for sequences of up to 64 tokens, unless `training` says otherwise."""
    training = {"seq_len": 64, "dtype": "float32", **sections.pop("training", {})}
    trainer = TitanTrainer(folder, loss, training=training, **sections)
    await trainer.setup()
    return trainer


async def start_reference(folder: Path, dtype: str = "float32", **training: Any) -> ReferenceModel:
    """For sequences of up to 64 tokens."""
    reference = ReferenceModel(folder, training={"seq_len": 64, "dtype": dtype, **training})
    await reference.setup()
    return reference


def gradients_of(trainer: TitanTrainer) -> dict[str, Tensor]:
    """By their Hugging Face names."""
    model = trainer.learner.model
    return model.adapter.to_hf({name: p.grad for part in model.parts for name, p in part.named_parameters()})
