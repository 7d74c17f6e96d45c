"""Colocation: generators on the GPUs of the trainer sleep while it works."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forge.controller import ActorHandle, Service


class Colocation:
    """Who gives way to whom on devices that all models share.

        colocation = Colocation(policy, trainer, ref_model, is_on=config.colocate)
        async with colocation.training():
            await trainer.train_step.call(inputs, targets)
        await sync.push(step, inputs, wait=True)

    Rollouts go on around it: their calls to the generators wait for the end of the block. Nothing inside may
    wait for tokens or scores of the generators, and `WeightSync.push` may (it ends the update before): it
    belongs behind the block, and waits, as a GPU has no room to load weights while the trainer steps.

    is_on: False where each model has devices of its own; nothing then gives way.
    """

    def __init__(
        self,
        policy: ActorHandle | Service,
        trainer: ActorHandle,
        ref_model: ActorHandle | Service | None = None,
        *,
        is_on: bool,
    ) -> None:
        self._policy, self._trainer, self._ref_model = policy, trainer, ref_model
        self.is_on = is_on

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The trainer has the devices, until the block ends, however it does.

        What trainer and reference model keep of a GPU's memory beyond their weights is given back before the
        other side needs it.
        """
        if not self.is_on:
            yield
            return
        try:
            await self._policy.sleep.fanout()
            if self._ref_model is not None:
                await self._ref_model.release_memory.fanout()
            yield
            await self._trainer.release_memory.call()
        finally:
            await self._policy.wake.fanout()
