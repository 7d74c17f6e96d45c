"""WeightSync: the generators follow the trainer, while the next step is under way."""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from torch import Tensor

from forge.controller import ActorHandle, Service
from forge.data_models import TrainInputs
from forge.observability import record
from forge.rl.checks import canary_texts, check_weights_arrived, logprobs_of


class WeightSync:
    """Takes every `interval`-th version of the trainer's weights to the generators, one at a time.

        async with WeightSync(trainer, policy, buffer) as sync:
            ...
            await trainer.train_step.call(inputs, targets)
            await sync.push(step, inputs)

    `push` returns once the trainer has packed a snapshot. What follows goes on beside the next step: storing
    it, the update of all generators, word to the replay buffer of which version generates now. An update that
    fails cancels the block at once, which then ends with its error; at its end the block waits for the last
    update.

    canary: after each update the log-probabilities of a few texts, the same for the whole run, are compared
    between the trainer and every generator (`forge.rl.checks.check_weights_arrived`). `push` then also waits
    until the trainer has scored them: at most `CANARY_TOKENS`.
    """

    def __init__(
        self,
        trainer: ActorHandle,
        policy: ActorHandle | Service,
        buffer: ActorHandle,
        *,
        interval: int = 1,
        canary: bool = True,
    ) -> None:
        self._trainer, self._policy, self._buffer = trainer, policy, buffer
        self._interval = interval
        self._canary = canary
        self._texts: list[list[int]] = []  # of the canary: the first batch's
        self._tasks = asyncio.TaskGroup()
        self._update: asyncio.Task[None] | None = None  # the last one

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:  # the first error is why there are others
            first = group.exceptions[0]
            raise first from first.__cause__

    async def push(
        self, version: int, batch: Sequence[TrainInputs], *, must: bool = False, wait: bool = False
    ) -> None:
        """Sends the weights as they are now, unless `version` is no multiple of the interval.

        Waits for the update before. batch: what was trained on, which the canary takes its texts from the
        first time. must: whatever the interval is, as the generators are asked next what these weights can
        do. wait: returns when the generators have what was sent.
        """
        if must or version % self._interval == 0:
            await self._finish()
            if self._update is None:
                await self._buffer.generating.call_one(0)
            if self._canary and not self._texts:
                self._texts = canary_texts(batch)
            await self._begin(version)
        if wait:
            await self._finish()

    async def resume(self, version: int) -> None:
        """To be called first where a run goes on after step `version`: returns when the generators, which
        come with the model's own weights, hold those of the trainer."""
        await self._begin(version)
        await self._finish()

    async def _begin(self, version: int) -> None:
        """Returns when the next step may change the weights."""
        await self._trainer.push_weights.call(version)
        trained = asyncio.ensure_future(self._score())
        self._update = self._tasks.create_task(self._take(version, trained), name=f"update to {version}")
        await trained

    async def _finish(self) -> None:
        """Waits for the update under way; raises its error."""
        if self._update is not None:
            await asyncio.wait([self._update])
            self._update.result()

    async def _score(self) -> Tensor | None:
        return await logprobs_of(self._trainer, self._texts) if self._texts else None

    async def _take(self, version: int, trained: "asyncio.Future[Tensor | None]") -> None:
        started = time.perf_counter()
        await self._trainer.finish_push.call()
        await self._policy.update_weights.fanout(version)
        await self._buffer.generating.call_one(version)
        record("weights", update_s=time.perf_counter() - started)
        if (logprobs := await trained) is not None:
            await check_weights_arrived(self._policy, self._texts, logprobs)
