"""Recipe: how the replicas of one service are made, the first time and again."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.controller.host import Seat
from forge.controller.ledger import Demand, Place
from forge.controller.mesh import Mesh
from forge.controller.provisioner import Provisioner
from forge.controller.replica import Replica, ReplicaState

if TYPE_CHECKING:
    from forge.controller.options import ActorOptions

_SUSPECT_AFTER = 2  # failures in a row; then it may be the device


class Recipe:
    """Class, options and arguments of a service, and where its processes come from."""

    def __init__(
        self,
        options: "ActorOptions[Any]",
        args: tuple,
        kwargs: dict[str, Any],
        provisioner: Provisioner,
        run_dir: Path,
        *,
        state_dir: Path,
    ) -> None:
        """run_dir: where processes tell what they wait for; state_dir: what outlives them, by replica."""
        self.options = options
        self._args, self._kwargs = args, kwargs
        self._provisioner = provisioner
        self._demand = Demand.of(options)
        self._run_dir = run_dir
        self._state_dir = state_dir

    def reserve(self, num_replicas: int) -> list[Place]:
        """A place for each of so many replicas; NotEnoughGPUs when they are not there."""
        return self._provisioner.reserve(self._demand, num_replicas)

    async def bring_up(self, replica: Replica, num_fanouts: Callable[[], int]) -> None:
        """LOADING -> SYNCED: new processes that have seen every fanout that has begun so far."""
        replica.state = ReplicaState.LOADING
        seat = Seat(
            self.options.name,
            replica.index,
            replica.generation,
            self._state_dir / str(replica.index),
            self.options.max_concurrent,
        )
        mesh = await Mesh.start(
            self._provisioner,
            self.options,
            seat,
            replica.place,
            self._args,
            self._kwargs,
            run_dir=self._run_dir,
        )
        try:
            num_seen = -1
            while num_seen != num_fanouts():
                num_seen = num_fanouts()
                async with asyncio.timeout(self.options.start_timeout_s):
                    await mesh.catch_up()
                replica.state = ReplicaState.SYNCED
        except BaseException:
            await mesh.kill(self._provisioner)
            raise
        replica.mesh = mesh

    async def move(self, replica: Replica) -> None:
        """Takes another place when the host is gone, or spare GPUs when its own may be at fault."""
        suspect = replica.failures >= _SUSPECT_AFTER
        replica.place = await self._provisioner.move(self._demand, replica.place, is_suspect=suspect)

    async def stop(self, replica: Replica) -> None:
        """Tears down, ends the processes, and gives the place back."""
        try:
            if replica.mesh is not None:
                await replica.mesh.stop(self._provisioner)
        finally:
            replica.mesh = None
            self._provisioner.give_back(replica.place)

    async def bury(self, replica: Replica) -> None:
        """Ends what is left of the processes; the place stays."""
        mesh, replica.mesh = replica.mesh, None
        if mesh is not None:
            await mesh.kill(self._provisioner)
