"""[5] TitanTrainer: episodes in, better weights out. torchtitan's model, sharding, optimizer and schedule."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from forge.actors.memory import keep_freed_memory, release_cached_memory
from forge.actors.trainer.micro_batch import MicroBatch, from_text
from forge.actors.trainer.options import trainer_options
from forge.actors.trainer.pushes import Pushes, clear_unfinished, pushed_versions, to_push_again
from forge.controller import ForgeActor, Runtime, call_id, endpoint
from forge.data_models import ForwardBackwardResult, Progress, TextTrainBatch, TrainInputs, TrainTargets
from forge.errors import ConfigError, ForgeError
from forge.observability import record

if TYPE_CHECKING:
    from forge.actors.trainer.checkpoint import Checkpoints
    from forge.actors.trainer.learner import Learner
    from forge.actors.trainer.loss_pass import Loss
    from forge.actors.trainer.recovery import Recovery
    from forge.actors.trainer.work import Method, Work

Inputs = Sequence[TrainInputs | TextTrainBatch]
Targets = Sequence[TrainTargets] | None


class TitanTrainer(ForgeActor):
    """Trains a model, each rank on its own share of every batch; all ranks hold the same weights afterwards.

    `inputs` and `targets` of its endpoints have one element for each data-parallel rank, and every rank gets
    them all. A loss is a mean over sequences, or over tokens where its attribute `normalize_by` is "tokens";
    a micro-batch is weighted by its share of them, so that neither micro-batches nor processes change the
    gradient.

    When one of its processes is killed, those that take their place go on from the same weights, optimizer
    state, schedule and random numbers, to the bit where the device computes the same numbers twice: no batch
    is lost and none trained twice. See forge.actors.trainer.recovery.

    With `checkpoint.folder` another run, under any parallel layout, goes on from where this one was, and
    `progress` tells how far that is. See forge.actors.trainer.checkpoint_options.

    A step whose loss or gradient is NaN or infinite is skipped: its result has the metric "skipped", and its
    batch is written to a file that forge.actors.trainer.bad_batches.load_bad_batch reads.
    """

    compute_bound: ClassVar[bool] = True
    recovers: ClassVar[bool] = True
    learner: "Learner"
    recovery: "Recovery"
    pushes: Pushes

    def __init__(
        self,
        model: Mapping[str, Any] | str | Path,
        loss: "Loss",
        optimizer: Mapping[str, Any] | None = None,
        lr_scheduler: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        parallelism: Mapping[str, Any] | None = None,
        checkpoint: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        """The keys of each section stand in forge.actors.trainer.options; the folder decides the model.

        loss: `(logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs)` to
        `(loss, metrics)`, with float32 logits [N, T, V] already divided by the temperature of the sampling.
        One that also has `from_logprobs` (see loss_pass.LogprobsLoss) is called by that, spared the logits.
        Raises ConfigError naming an unknown key or a wrong value.
        """
        if not callable(loss):
            raise ConfigError(
                f"loss must be callable, got {loss!r}: give GRPOLoss() or one with its signature"
            )
        self.config = trainer_options(
            model,
            optimizer=optimizer or {},
            lr_scheduler=lr_scheduler or {},
            training=training or {},
            parallelism=parallelism or {},
            checkpoint=checkpoint or {},
        )
        self.config.check(self.world_size)
        self.loss = loss
        self.seed = seed
        # All ranks must do the same in the same order, and calls may overlap: each waits for its turn here.
        self._turn = asyncio.Lock()

    @classmethod
    async def prepare(cls) -> None:
        """Opens the store that weights are pushed to."""
        from forge.weights import close_store, open_store

        await open_store()
        Runtime.current().on_close(close_store)

    async def setup(self) -> None:
        """Builds, shards and loads the model."""
        keep_freed_memory()
        await self.run_blocking(self._build)

    def _build(self) -> None:
        from forge.actors.trainer.learner import Learner  # takes seconds: torchtitan
        from forge.actors.trainer.recovery import Recovery
        from forge.actors.trainer.source import resolve_model
        from forge.actors.trainer.steps import Steps

        source = resolve_model(self.config.model)
        self.pushes = Pushes(rank=self.rank, world_size=self.world_size)
        self.learner = Learner(source, self.config, self.loss, world_size=self.world_size, seed=self.seed)
        self.recovery = Recovery(
            self.learner,
            self.state_dir,
            rank=self.rank,
            world_size=self.world_size,
            snapshot_every=self.config.training.snapshot_every,
            steps=Steps(
                self.learner,
                max_skipped=self.config.training.max_skipped_steps,
                folder=self._bad_batch_folder(),
                rank=self.rank,
            ),
            checkpoints=self._checkpoints(),
            pushes=self.pushes,
        )

    def _checkpoints(self) -> "Checkpoints | None":
        from forge.actors.trainer.checkpoint import Checkpoints

        options = self.config.checkpoint
        return Checkpoints(self.learner, options, rank=self.rank) if options.folder is not None else None

    def _bad_batch_folder(self) -> Path | None:
        if self.config.training.bad_batch_folder is not None:
            return Path(self.config.training.bad_batch_folder)
        if self.config.checkpoint.folder is not None:
            return Path(self.config.checkpoint.folder) / "bad_batches"
        return self.state_dir / "bad_batches" if self.state_dir is not None else None

    async def catch_up(self) -> None:
        """Brings a trainer to where its checkpoint was, and one that takes the place of a killed one to where
        that one was."""
        if not self.recovery.restored:
            await self._repeat_lost_work()

    async def _repeat_lost_work(self) -> None:
        todo: list[Work] = await self.run_blocking(self.recovery.restore)
        again: list[int] = []
        if self.recovery.others_pushed:
            begun = [work.version for work in todo if work.version is not None]
            again = to_push_again(begun, await pushed_versions())
            if self.rank == 0:
                await clear_unfinished()
            await self.run_blocking(self.recovery.meet)  # none publishes before
        for work in todo:
            await self.run_blocking(self.recovery.repeat, work)
            if work.version in again:
                again.remove(work.version)
                await self._push(work.version)
                await self.pushes.finish()

    async def teardown(self) -> None:
        """Leaves the other ranks, when the push under way is stored."""
        if hasattr(self, "recovery"):  # setup may have failed
            await self.pushes.close()
            await self.run_blocking(self.recovery.close)
            await self.run_blocking(self.learner.model.close)

    @endpoint(retry=True)
    async def train_step(
        self, inputs: Inputs, targets: Targets = None, state: dict[str, Any] | None = None
    ) -> ForwardBackwardResult:
        """One optimizer step on one batch; the metrics also hold grad_norm, lr and num_tokens.

        state: what `progress` is to return when a run resumes after this step: a position in the data, say.
        Where the loss or the gradient is not finite, weights, optimizer and schedule stay as they were: the
        result has the metric "skipped", and after `training.max_skipped_steps` of these in a row the next one
        raises NotFinite, naming the episodes.
        """
        batches = self._batches(inputs, targets)
        result = await self._do("train_step", batches, state=state)
        self._record(result)
        return result

    @endpoint(retry=True)
    async def forward_backward(self, inputs: Inputs, targets: Targets = None) -> ForwardBackwardResult:
        """Adds one batch's gradient to those gathered since the last `optim_step`; an error drops them.

        One that is not finite makes that `optim_step` skip the step.
        """
        batches = self._batches(inputs, targets)
        result = await self._do("forward_backward", batches)
        self._record(result)
        return result

    @endpoint(retry=True)
    async def optim_step(self, state: dict[str, Any] | None = None) -> dict[str, float]:
        """Clips the gathered gradients, updates the weights, advances the schedule: grad_norm and lr; only
        "skipped" when the step is skipped. state: as in `train_step`."""
        update = await self._do("optim_step", state=state)
        if self.rank == 0:
            record("trainer", **update)
        return update

    @endpoint(retry=True)
    async def evaluate(self, inputs: Inputs, targets: Targets = None) -> ForwardBackwardResult:
        """The loss of one batch and its metrics, as `forward_backward` computes them, and nothing changed."""
        batches = self._batches(inputs, targets)
        return await self._in_turn(self.learner.evaluate, batches)

    @endpoint(retry=True)
    async def logprobs(self, inputs: Sequence[TrainInputs], targets: Sequence[TrainTargets]) -> list[Tensor]:
        """Log-probabilities of the targets under the current weights and the temperature of the sampling, for
        each data-parallel rank [N, T] float32, in nats, 0 where masked, of its targets in their order.

        They are computed as the loss of this batch computes its own, in the same passes: a ratio of the two
        is exactly 1 until the weights change. Nothing else is changed.
        """
        return await self._in_turn(self.learner.logprobs, self._batches(inputs, targets))

    @endpoint(retry=True)
    async def gradient_norms(self, inputs: Inputs, targets: Targets = None) -> tuple[float, float]:
        """The norm of a batch's gradient as a step would compute it, and with each row in a pass of its own:
        what should be the same up to rounding. Nothing is changed; NaN where a loss is not finite.

        Raises ForgeError between `forward_backward` and `optim_step`.
        """
        return await self._in_turn(self.learner.gradient_norms, self._batches(inputs, targets))

    @endpoint(retry=True)
    async def release_memory(self) -> None:
        """Gives back what it keeps of the GPU's memory for its next step."""
        await self._in_turn(release_cached_memory)

    @endpoint(retry=True)
    async def progress(self) -> Progress:
        """The optimizer steps done, and the `state` given with the last of them, over all restarts."""
        return await self._in_turn(self.recovery.progress)

    @endpoint(retry=True)
    async def save_checkpoint(self, state: dict[str, Any] | None = None, wait: bool = True) -> None:
        """Saves all that the next step depends on, beside the saves every `checkpoint.interval` steps.

        state: what `progress` returns after a resume; None: that of the last step. Returns when the
        checkpoint is complete; before the first step there is nothing to save. Raises ForgeError without
        `checkpoint.folder`, between `forward_backward` and `optim_step`, and when it can't be written.
        wait: False returns once the state is copied, as the saves of the interval do (see
        `checkpoint.async_mode`): it is written beside the next step. One that can't be written is then told
        in the log, and the next one is waited for, and raises if it can't be written either.
        """
        await self._do("save_checkpoint", state=state, wait=wait)

    @endpoint(retry=True)
    async def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probability of each token but the first, given those before it, under the current weights:
        [T - 1] float32, in nats."""
        return await self._in_turn(self.learner.score, torch.tensor(token_ids))

    @endpoint(retry=True)
    async def push_weights(self, version: int) -> None:
        """Publishes the weights as they are now, adapters merged, by their Hugging Face names, in
        `training.dtype`.

        Returns when they are copied; storing them goes on beside the next step, one version at a time. An
        error of that is raised by the next `push_weights` or `finish_push`, and at once by those who wait for
        the version. The store keeps the newest two, so that a slow reader of the one before still gets it.

        Raises ForgeError for a version below 1.
        """
        if version < 1:
            raise ForgeError(
                f"versions of the weights count from 1, got {version}: generators begin with 0, so that none "
                "would load it"
            )
        async with self._turn:
            await self.run_blocking(self.recovery.do, call_id(), "push_weights", version=version)
            if self.recovery.others_pushed and version in await pushed_versions():
                return  # by a process that is gone, or in `catch_up`
            await self._push(version)

    @endpoint(retry=True)
    async def finish_push(self) -> None:
        """Returns when the version that was pushed last is stored; raises what went wrong with it.

        Where a process was killed meanwhile, when it is stored again.
        """
        await self.pushes.stored()

    async def _push(self, version: int) -> None:
        """Returns when the weights are copied."""
        merge = await self.run_blocking(self.learner.model.merge)
        await self.pushes.begin(version, partial(self.run_blocking, self.learner.pack, merge=merge))

    @endpoint(retry=True)
    async def export(self, folder: str) -> None:
        """Writes a Hugging Face folder, in `training.dtype`, that transformers and vLLM load: rank 0 does.

        With `training.lora` the adapters are merged into it, and its folder `adapter` holds them by
        themselves, as PEFT and vLLM's LoRARequest load them.
        """
        await self._in_turn(self.learner.export, Path(folder), rank=self.rank)

    async def _in_turn(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs blocking work when all calls before have been done."""
        async with self._turn:
            return await self.run_blocking(function, *args, **kwargs)

    async def _do(self, method: "Method", *args: Any, **kwargs: Any) -> Any:
        return await self._in_turn(self.recovery.do, call_id(), method, *args, **kwargs)

    def _batches(self, inputs: Inputs, targets: Targets) -> list[MicroBatch]:
        """Every rank's batch, checked; text becomes rows of one segment."""
        dp_size, size = self.learner.model.job.dp_size, self.config.training.local_batch_size
        if len(inputs) != dp_size or (targets is not None and len(targets) != dp_size):
            got = f"{len(inputs)} inputs" + (f" and {len(targets)} targets" if targets is not None else "")
            raise ForgeError(
                f"the trainer has {dp_size} data-parallel ranks and needs a batch for each, got {got}"
            )
        batches: list[MicroBatch] = []
        for i, given in enumerate(inputs):
            if isinstance(given, TextTrainBatch):
                batches.append(from_text(given))
            elif targets is None:
                raise ForgeError("TrainInputs need TrainTargets beside them")
            else:
                batches.append((given, targets[i]))
        total = sum(len(given.target_ids) for _, given in batches)
        if size is not None and total != size * dp_size:
            raise ForgeError(
                f"training.local_batch_size is {size}, but {dp_size} ranks got {total} sequences together"
            )
        return batches

    def _record(self, result: ForwardBackwardResult) -> None:
        """One rank speaks for all: results are those of the whole batch."""
        if self.rank == 0 and "skipped" in result.metrics:
            record("trainer", skipped=1.0)  # the loss may be NaN: no number to draw
        elif self.rank == 0:
            parts = dict(result.metrics)
            own = {name: parts.pop(name) for name in ("num_tokens", "grad_norm", "lr") if name in parts}
            record("trainer", **own)
            record("loss", total=result.loss, **parts)
