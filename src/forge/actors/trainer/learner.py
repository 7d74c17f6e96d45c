"""One rank's part of a training step: gradients gathered over micro-batches and ranks, then an update."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from forge.actors.trainer.agreement import from_rank_0
from forge.actors.trainer.checkpoint_files import replacing, save_weights
from forge.actors.trainer.feed import Query
from forge.actors.trainer.loss_pass import Loss, as_floats, loss_of, normalizer_of, token_means_of
from forge.actors.trainer.micro_batch import (
    MicroBatch,
    Shares,
    moved,
    name_episodes,
    part_of,
    plan_passes,
    suspects_among,
    to_device,
    with_equal_lengths,
)
from forge.actors.trainer.options import TrainerOptions
from forge.actors.trainer.readout import Readout
from forge.actors.trainer.sharded import ShardedModel
from forge.actors.trainer.source import ModelSource
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
        self, source: ModelSource, options: TrainerOptions, loss: Loss, *, world_size: int, seed: int
    ) -> None:
        """Raises ConfigError where the model can't be cut as `options` say, or for a loss that averages over
        something unknown."""
        normalizer_of(loss)  # a wrong one is told before the model is built
        self.model = ShardedModel(
            source, options.training, options.parallelism, world_size=world_size, seed=seed
        )
        self.loss = loss
        # a pipeline that has fewer micro-batches than processes leaves some of them idle
        self.num_micro_batches = max(
            options.training.gradient_accumulation_steps, options.parallelism.pipeline_parallel_degree
        )
        self._max_tokens = options.training.max_tokens_per_pass
        self.update = Update(
            self.model.parts,
            options.optimizer,
            options.lr_scheduler,
            options.training,
            self.model.job.pp_mesh,
        )
        self._pending: list[TrainTargets] = []  # those whose gradients wait for an update

    def forward_backward(self, batches: Sequence[MicroBatch]) -> ForwardBackwardResult:
        """Adds the gradient of one batch, given as every rank's part of it.

        Raises NotFinite, on every rank, naming the episodes whose loss is not finite; gathered gradients are
        then dropped.
        """
        result = self._run(batches, backward=True)
        self._pending += [targets for _, targets in batches]
        return result

    def evaluate(self, batches: Sequence[MicroBatch]) -> ForwardBackwardResult:
        """The same loss and metrics; no gradient is added, none dropped, and a loss may be NaN."""
        return self._run(batches, backward=False)

    def _run(self, batches: Sequence[MicroBatch], *, backward: bool) -> ForwardBackwardResult:
        shares = Shares.of([targets for _, targets in batches], normalizer_of(self.loss))
        if shares.num_tokens == 0:
            raise ForgeError("a batch without a single unmasked target can't be trained on")
        for inputs, targets in batches:
            self.model.check(inputs, targets.target_ids[targets.loss_mask.bool()])
        plans, rank = plan_passes(batches, self.num_micro_batches, self._max_tokens), self.model.job.dp_rank
        own = with_equal_lengths(batches)[rank]
        tallies = self._tally([part_of(own, rows) for rows in plans[rank]], shares, backward)
        if backward:
            self._check_losses(tallies, batches, plans)
        everything = Tally.merge(tallies)
        everything.metrics["num_tokens"] = float(shares.num_tokens)
        return ForwardBackwardResult(sum(everything.losses), everything.metrics)

    def _tally(self, passes: Sequence[MicroBatch], shares: Shares, backward: bool) -> list[Tally]:
        """Runs this rank's micro-batches; returns every data-parallel rank's tally.

        What the loss raised on one rank is raised on all, as a ForgeError.
        """
        weights = [shares.weight(targets) for _, targets in passes]
        token_weights = [shares.token_weight(targets) for _, targets in passes]
        parts = [to_device(part, self.model.device) for part in passes]
        tally = Tally(token_means_of(self.loss))

        def read(i: int, readout: Readout) -> Tensor:
            loss, metrics = loss_of(readout, self.loss, parts[i][1])
            tally.add(float(loss.detach()), as_floats(metrics), weights[i], token_weights[i])
            return loss * weights[i]

        queries = [Query(inputs, targets.source_ids[targets.loss_mask.bool()]) for inputs, targets in parts]
        job = self.model.job
        try:
            failure = self.model.run(queries, read, backward=backward)
            told = job.from_head(job.gather((tally, failure)))
            _raise_any([failure for _, failure in told])
        except Exception:  # cleaned up behind, and raised again
            if backward:  # what was added before it broke is no gradient of anything
                self.forget()
            raise
        return [tally for tally, _ in told]

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

    def score(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> log-probabilities [T - 1] float32 of each but the first, given those before it."""
        given = TrainInputs(token_ids[None], torch.arange(len(token_ids))[None], token_ids[None] * 0)
        self.model.check(given)
        inputs = moved(given, self.model.device)
        tokens = inputs.input_ids
        return self.model.logprobs(inputs, inputs.positions[0, :-1], tokens[0, 1:])

    @torch.no_grad()
    def copy_weights(self) -> dict[str, Tensor]:
        """The weights, or this rank's shards, by Hugging Face names in the computing dtype; the next step
        does not touch them."""
        return {
            name: t.detach().to(self.model.dtype, copy=True) for name, t in self.model.hf_tensors().items()
        }

    def export(self, folder: Path, *, rank: int) -> None:
        """A Hugging Face folder in the computing dtype; rank 0 writes it, all must call.

        No process holds more of the model than its own part and the tensors of one file. Raises ForgeError,
        on every rank, when it can't be written.
        """
        tensors = self.model.whole_tensors(self.model.dtype)
        if rank != 0:
            for _ in tensors:
                pass
        from_rank_0(lambda: self._write(folder, tensors), rank)

    def _write(self, folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
        try:
            with replacing(folder) as new:
                save_weights(tensors, new)
                self.model.source.save_companions(new, self.model.dtype)
        except (OSError, SafetensorError) as error:
            raise ForgeError(f"the model can't be exported to {folder}: {error}") from error
        finally:
            for _ in tensors:  # the other ranks go through all of them
                pass

    def _check_losses(
        self, tallies: Sequence[Tally], batches: Sequence[MicroBatch], plans: Sequence[list[list[int]]]
    ) -> None:
        bad = [
            part_of(batch, plan[i])[1]
            for batch, plan, tally in zip(batches, plans, tallies, strict=True)
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


def _raise_any(failures: Sequence[ForgeError | None]) -> None:
    """Raises the first of those that the data-parallel ranks had, naming the rank where there are several."""
    for rank, failure in enumerate(failures):
        if failure is not None:
            if len(failures) > 1:
                failure.args = (f"data-parallel rank {rank}: {failure}",)
            raise failure


def _not_finite(what: str, targets: Sequence[TrainTargets]) -> NotFinite:
    told = f"the {what} {name_episodes(targets)} is not finite: the weights were left as they were"
    return NotFinite(told, suspects_among(targets))
