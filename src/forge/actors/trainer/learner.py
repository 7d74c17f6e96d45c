"""One rank's part of a training step: gradients gathered over micro-batches and ranks, then an update."""

import math
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from forge.actors.trainer.agreement import from_every_rank, from_rank_0, own_rank, raise_any
from forge.actors.trainer.checkpoint_files import replacing, save_adapter, save_weights
from forge.actors.trainer.feed import queries_of
from forge.actors.trainer.lora import Merge, peft_config
from forge.actors.trainer.loss_pass import (
    Loss,
    as_floats,
    logprobs_of,
    loss_of,
    normalizer_of,
    token_means_of,
    whole_batch_metrics,
)
from forge.actors.trainer.loss_state import ChangingLoss, check_state, restore, state_of, tell_step
from forge.actors.trainer.micro_batch import (
    MicroBatch,
    Shares,
    completions_in,
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
from forge.actors.trainer.tally import Tally, metrics_of_step
from forge.actors.trainer.update import Update
from forge.data_models import ForwardBackwardResult, TrainInputs, TrainTargets
from forge.errors import ForgeError, NotFinite

if TYPE_CHECKING:
    from forge.weights import Push

ADAPTER = "adapter"
"""The folder, within that of an exported model, of the adapter by itself."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides the next steps beside the learner's tensors."""

    num_steps: int
    random: tuple[Tensor, Tensor | None]  # state of torch's generators: the CPU's and the device's
    loss: dict[str, Any] | None  # see loss_state.state_of


class Learner:
    """Model, loss and optimizer of one rank. Every rank must make the same calls in the same order."""

    def __init__(
        self, source: ModelSource, options: TrainerOptions, loss: Loss, *, world_size: int, seed: int
    ) -> None:
        """Raises ConfigError where the model can't be cut as `options` say, or for a loss that averages over
        something unknown, or would lose its state."""
        normalizer_of(loss)  # a wrong one is told before the model is built
        check_state(loss)
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
        self._gathered: list[tuple[Shares, dict[str, float]]] = []  # of their batches

    def forward_backward(self, batches: Sequence[MicroBatch]) -> ForwardBackwardResult:
        """Adds the gradient of one batch, given as every rank's part of it.

        Raises NotFinite, on every rank, naming the episodes whose loss is not finite; gathered gradients are
        then dropped.
        """
        shares = self._shares(batches)
        result = self._run(batches, shares, backward=True)
        self._pending += [targets for _, targets in batches]
        self._gathered.append((shares, result.metrics))
        return self._whole(result)

    def evaluate(self, batches: Sequence[MicroBatch]) -> ForwardBackwardResult:
        """The same loss and metrics; no gradient is added, none dropped, and a loss may be NaN."""
        return self._whole(self._run(batches, self._shares(batches), backward=False))

    def _whole(self, result: ForwardBackwardResult) -> ForwardBackwardResult:
        """With the metrics that only a whole batch has."""
        return ForwardBackwardResult(result.loss, whole_batch_metrics(self.loss, result.metrics))

    def _shares(self, batches: Sequence[MicroBatch]) -> Shares:
        shares = Shares.of([targets for _, targets in batches], normalizer_of(self.loss))
        if shares.num_tokens == 0:
            raise ForgeError("a batch without a single unmasked target can't be trained on")
        return shares

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Each data-parallel rank's [N, T] float32 of its targets under the current weights, 0 where masked:
        what the loss of this batch reads now, to the bit."""
        plans, rank = self._plan(batches), self.model.job.dp_rank
        parts = [part_of(batches[rank], rows) for rows in plans[rank]]
        on_device = [to_device(part, self.model.device) for part in parts]
        found: list[Tensor] = []

        def read(i: int, readout: Readout) -> Tensor:
            found.append(logprobs_of(readout, self.loss, on_device[i][1]).cpu())
            return readout.nothing()

        failure = self.model.run(queries_of(on_device), read, backward=False)
        own = torch.zeros_like(batches[rank][1].target_ids, dtype=torch.float32)
        for rows, values in zip(plans[rank], found, strict=False):  # found: on processes with the head only
            own[completions_in(batches[rank], rows)] = values
        told = self.model.job.from_head(self.model.job.gather((own, failure)))
        raise_any([failure for _, failure in told], "data-parallel rank")
        return [values for values, _ in told]

    def gradient_norms(self, batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """The norm of the gradient as a step computes it, and with each row alone in its pass; NaN where a
        loss is not finite. Raises ForgeError where gathered gradients wait for an update."""
        if self._pending:
            raise ForgeError(
                "gradient_norms came between forward_backward and optim_step, and would drop what is "
                "gathered: call it after optim_step"
            )
        row_by_row = max(len(inputs.input_ids) for inputs, _ in batches)
        return self._norm(batches, self.num_micro_batches), self._norm(batches, row_by_row)

    def _norm(self, batches: Sequence[MicroBatch], num_passes: int) -> float:
        try:
            self._run(batches, self._shares(batches), backward=True, num_passes=num_passes)
            return self.update.norm()
        except NotFinite:
            return math.nan
        finally:
            self.forget()

    def _plan(self, batches: Sequence[MicroBatch], num_passes: int | None = None) -> list[list[list[int]]]:
        """The rows of every rank's passes, of which there are `num_passes` at least; checked."""
        for inputs, targets in batches:
            self.model.check(inputs, targets.target_ids[targets.loss_mask.bool()])
        return plan_passes(batches, num_passes or self.num_micro_batches, self._max_tokens)

    def _run(
        self,
        batches: Sequence[MicroBatch],
        shares: Shares,
        *,
        backward: bool,
        num_passes: int | None = None,
    ) -> ForwardBackwardResult:
        plans, rank = self._plan(batches, num_passes), self.model.job.dp_rank
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

        job = self.model.job
        try:
            failure = self.model.run(queries_of(parts), read, backward=backward)
            told = job.from_head(job.gather((tally, failure)))
            raise_any([failure for _, failure in told], "data-parallel rank")
        except Exception:  # cleaned up behind, and raised again
            if backward:  # what was added before it broke is no gradient of anything
                self.forget()
            raise
        return [tally for tally, _ in told]

    def optim_step(self) -> dict[str, float]:
        """Updates the weights, and tells the loss: grad_norm (before clipping) and lr.

        Raises NotFinite naming the episodes when the gradient is not finite; the weights are left alone.
        What the loss raises is a ForgeError on every rank, and the step was done.
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
        self._tell_loss()
        return {"grad_norm": grad_norm, "lr": lr}

    def _tell_loss(self) -> None:
        """Of the step that was done, with the same metrics on all ranks."""
        gathered = metrics_of_step(self._gathered, token_means_of(self.loss))
        metrics = whole_batch_metrics(self.loss, gathered)
        self._gathered = []
        if isinstance(self.loss, ChangingLoss):
            # processes that share a layer may differ in the last bit of what they computed
            same = from_rank_0(lambda: metrics, own_rank())
            raise_any(from_every_rank(tell_step(self.loss, same)))

    def score(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> log-probabilities [T - 1] float32 of each but the first, given those before it."""
        given = TrainInputs(token_ids[None], torch.arange(len(token_ids))[None], token_ids[None] * 0)
        self.model.check(given)
        inputs = moved(given, self.model.device)
        tokens = inputs.input_ids
        return self.model.logprobs(inputs, inputs.positions[0, :-1], tokens[0, 1:])

    @torch.no_grad()
    def pack(self, push: "Push", merge: Merge | None = None) -> None:
        """Copies the weights, or this rank's shards, by Hugging Face names in the computing dtype.

        merge: `model.merge()`, made before the push is begun: if that fails on one rank, others don't wait.
        """
        push.pack(self.model.hf_tensors(), dtype=self.model.dtype, change=merge and merge.part)

    def export(self, folder: Path, *, rank: int) -> None:
        """A Hugging Face folder in the computing dtype; rank 0 writes it, all must call. Adapters are merged,
        and stand in its folder `adapter` as PEFT has them.

        No process holds more of the model than its own part and the tensors of one file. Raises ForgeError,
        on every rank, when it can't be written.
        """
        tensors, adapters = self.model.whole_tensors(self.model.dtype), self.model.whole_adapters()
        if rank != 0:
            deque(chain(tensors, adapters), maxlen=0)
        from_rank_0(lambda: self._write(folder, tensors, adapters), rank)

    def _write(
        self, folder: Path, tensors: Iterator[tuple[str, Tensor]], adapters: Iterator[tuple[str, Tensor]]
    ) -> None:
        try:
            with replacing(folder) as new:
                save_weights(tensors, new)
                self.model.source.save_companions(new, self.model.dtype)
                if (folder / ADAPTER).exists():  # an earlier export's, of other weights
                    shutil.rmtree(folder / ADAPTER)
            if self.model.lora is not None:
                config = peft_config(self.model.lora, self.model.source)
                save_adapter(dict(adapters), config, folder / ADAPTER)
        except (OSError, SafetensorError) as error:
            raise ForgeError(f"the model can't be exported to {folder}: {error}") from error
        finally:
            deque(chain(tensors, adapters), maxlen=0)  # the other ranks go through all of them

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
        self._pending, self._gathered = [], []

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
        return Facts(self.num_steps, (torch.get_rng_state(), device), state_of(self.loss))

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
        restore(self.loss, facts.loss)


def _not_finite(what: str, targets: Sequence[TrainTargets]) -> NotFinite:
    told = f"the {what} {name_episodes(targets)} is not finite: the weights were left as they were"
    return NotFinite(told, suspects_among(targets))
