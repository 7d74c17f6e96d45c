"""One rank's part of a training step: gradients gathered over micro-batches and ranks, then an update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from forge.actors.trainer.checkpoint_files import replacing, save_companions, save_weights, whole
from forge.actors.trainer.head import token_logprobs
from forge.actors.trainer.loss_pass import Loss, as_floats, loss_of, normalizer_of
from forge.actors.trainer.micro_batch import (
    MicroBatch,
    count,
    name_episodes,
    split_micro_batches,
    suspects_among,
    to_device,
)
from forge.actors.trainer.options import TrainerOptions
from forge.actors.trainer.sharded import ShardedModel
from forge.actors.trainer.tally import Tally
from forge.actors.trainer.update import Update
from forge.data_models import ForwardBackwardResult, TrainInputs, TrainTargets
from forge.errors import ForgeError, NotFinite


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides the next steps beside the learner's tensors."""

    num_steps: int
    random: tuple[Tensor, Tensor | None]  # state of torch's generators: the CPU's and the device's
    loss: dict[str, Any] | None  # state of a loss that has `state_dict` and `load_state_dict`


class Learner:
    """Model, loss and optimizer of one rank. Every rank must make the same calls in the same order."""

    def __init__(
        self, folder: Path, options: TrainerOptions, loss: Loss, *, world_size: int, seed: int
    ) -> None:
        self.model = ShardedModel(
            folder, options.training, options.parallelism, world_size=world_size, seed=seed
        )
        self.loss = loss
        self.accumulation_steps = options.training.gradient_accumulation_steps
        self.update = Update(self.model.module, options.optimizer, options.lr_scheduler, options.training)
        self._pending: list[TrainTargets] = []  # those whose gradients wait for an update

    def forward_backward(self, batches: Sequence[MicroBatch]) -> ForwardBackwardResult:
        """Adds the gradient of one batch, given as every rank's part of it.

        Raises NotFinite, on every rank, naming the episodes whose loss is not finite; gathered gradients are
        then dropped.
        """
        normalize_by = normalizer_of(self.loss)
        total = sum(count(targets, normalize_by) for _, targets in batches)
        if total == 0:
            raise ForgeError("a batch without a single unmasked target can't be trained on")
        # on every rank the same number, as sharded passes need
        n = min(self.accumulation_steps, *(len(inputs.input_ids) for inputs, _ in batches))
        tally = Tally()
        for part in split_micro_batches(*batches[self.model.dp_rank], n):
            weight = count(part[1], normalize_by) / total
            loss, metrics = loss_of(self.model, self.loss, to_device(part, self.model.device))
            (loss * weight).backward()
            tally.add(float(loss.detach()), as_floats(metrics), weight)
        self._pending += [targets for _, targets in batches]
        tallies = self._gather(tally)
        self._check_losses(tallies, batches, n)
        everything = Tally.merge(tallies)
        everything.metrics["num_tokens"] = float(sum(count(targets, "tokens") for _, targets in batches))
        return ForwardBackwardResult(sum(everything.losses), everything.metrics)

    def optim_step(self) -> dict[str, float]:
        """Updates the weights: grad_norm (before clipping) and lr.

        Raises NotFinite naming the episodes when the gradient is not finite; the weights are left alone.
        """
        if not self._pending:
            raise ForgeError("optim_step needs a forward_backward before it")
        grad_norm = self.update.clip()
        if not math.isfinite(grad_norm):
            error = _not_finite("gradient", self._pending)
            self.forget()
            raise error
        lr = self.update.step()
        self._pending = []
        return {"grad_norm": grad_norm, "lr": lr}

    @torch.no_grad()
    def score(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> log-probabilities [T - 1] float32 of each but the first, given those before it."""
        tokens = token_ids.to(self.model.device)[None]
        inputs = TrainInputs(tokens, torch.arange(tokens.shape[1], device=tokens.device)[None], tokens * 0)
        logits = self.model.logits(inputs, inputs.positions[0, :-1])
        return token_logprobs(logits, tokens[0, 1:])[0].cpu()

    @torch.no_grad()
    def copy_weights(self) -> dict[str, Tensor]:
        """The weights, or this rank's shards, by Hugging Face names in the computing dtype; the next step
        does not touch them."""
        return {
            name: t.detach().to(self.model.dtype, copy=True) for name, t in self.model.hf_tensors().items()
        }

    @torch.no_grad()
    def export(self, folder: Path, *, write: bool) -> None:
        """A Hugging Face folder in the computing dtype; one rank writes it, all must call."""
        dtype = self.model.dtype
        tensors = {name: whole(t.to(dtype)).cpu() for name, t in self.model.hf_tensors().items()}
        if write:
            with replacing(folder) as new:
                save_weights(tensors, new)
                save_companions(self.model.folder, new, dtype)
        if dist.is_initialized():
            dist.barrier()

    def _gather(self, tally: Tally) -> list[Tally]:
        """The tallies of all data-parallel ranks, in their order."""
        if self.model.dp_mesh is None:
            return [tally]
        tallies: list[Tally] = [tally] * self.model.dp_size
        dist.all_gather_object(tallies, tally, group=self.model.dp_mesh.get_group())
        return tallies

    def _check_losses(self, tallies: Sequence[Tally], batches: Sequence[MicroBatch], n: int) -> None:
        bad = [
            split_micro_batches(*batch, n)[i][1]
            for batch, tally in zip(batches, tallies, strict=True)
            for i, loss in enumerate(tally.losses)
            if not math.isfinite(loss)
        ]
        if bad:
            self.forget()
            raise _not_finite("loss", bad)

    def forget(self) -> None:
        """Drops the gathered gradients."""
        self.update.zero_grad()
        self._pending = []

    @property
    def num_steps(self) -> int:
        """Updates so far."""
        return self.update.num_steps

    def tensors(self) -> list[Tensor]:
        """This rank's part of weights and optimizer, live: with `facts` all that the next step depends on,
        as long as no gradients wait for it."""
        return self.update.tensors()

    def facts(self) -> Facts:
        """The rest of it."""
        assert not self._pending, "gathered gradients are in no snapshot"
        device = torch.cuda.get_rng_state(self.model.device) if self.model.device.type == "cuda" else None
        loss = self.loss.state_dict() if isinstance(self.loss, Stateful) else None
        return Facts(self.num_steps, (torch.get_rng_state(), device), loss)

    def allocate(self) -> None:
        """Makes room for what is to be written to `tensors`."""
        self.update.allocate()

    def resume(self, facts: Facts) -> None:
        """Goes on from these facts, once `tensors` hold what they held then."""
        self.update.resume(facts.num_steps)
        host, device = facts.random
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device, self.model.device)
        if isinstance(self.loss, Stateful) and facts.loss is not None:
            self.loss.load_state_dict(facts.loss)


def _not_finite(what: str, targets: Sequence[TrainTargets]) -> NotFinite:
    told = f"the {what} {name_episodes(targets)} is not finite: the weights were left as they were"
    return NotFinite(told, suspects_among(targets))
