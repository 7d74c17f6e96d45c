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
from forge.errors import ActorFailure

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
                await self._catch_up(mesh, replica.index)
                replica.state = ReplicaState.SYNCED
        except BaseException:
            await mesh.kill(self._provisioner)
            raise
        replica.mesh = mesh

    async def _catch_up(self, mesh: Mesh, index: int) -> None:
        deadline = asyncio.timeout(self.options.start_timeout_s)
        try:
            async with deadline:
                await mesh.catch_up()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise ActorFailure(
                f"{self.options.name}: catch_up of replica {index} was not done within "
                f"{self.options.start_timeout_s:g} s: raise start_timeout_s, or see what it waits for"
            ) from None

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

    def give_back(self, replica: Replica) -> None:
        """Frees its place, for one that will not start again."""
        self._provisioner.give_back(replica.place)

    async def bury(self, replica: Replica) -> None:
        """Ends what is left of the processes; the place stays."""
        mesh, replica.mesh = replica.mesh, None
        if mesh is not None:
            await mesh.kill(self._provisioner)
