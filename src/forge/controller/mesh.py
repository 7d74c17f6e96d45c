"""Mesh: the processes of one actor or one replica, from start to stop."""

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING, Any

from forge.controller.handle import ActorHandle, translated_errors
from forge.controller.host import ActorHost
from forge.controller.provisioner import Placement, Provisioner
from forge.errors import ActorFailure, ForgeError
from forge.observability import metrics

if TYPE_CHECKING:
    from forge.controller.options import ActorOptions

logger = logging.getLogger(__name__)
_serial = itertools.count()


class Mesh:
    """A started actor: its handle, its processes, and how to end them."""

    def __init__(self, name: str, handle: ActorHandle, placement: Placement, hosts: Any) -> None:
        self.name = name
        self.handle = handle
        self._placement = placement
        self._hosts = hosts
        self._pids: list[int] = []

    @classmethod
    async def start(
        cls,
        provisioner: Provisioner,
        options: "ActorOptions[Any]",
        gpus: list[int],
        replica: int,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> "Mesh":
        """Spawns the processes, constructs the actor in each, runs `setup`; on any error nothing is left."""
        name = f"{options.name}_{next(_serial)}"
        env = {**options.cls.bootstrap_env(), "FORGE_REPLICA": str(replica), **options.env}
        placement = provisioner.spawn(
            name, options.procs, gpus, compute_bound=options.cls.compute_bound, env=env
        )
        hosts = placement.procs.spawn(name, ActorHost, options.name)
        handle = ActorHandle(name, options.cls, hosts, options.procs)
        mesh = cls(name, handle, placement, hosts)
        try:
            with translated_errors(f"{name}.start"):
                pids = await hosts.construct.call(options.cls, args, kwargs, handle)
                mesh._pids = [pid for _, pid in pids.items()]
                await hosts.setup.call()
        except BaseException:
            await mesh.stop(provisioner)
            raise
        return mesh

    async def drain_metrics(self) -> list[dict[str, metrics.Stat]]:
        """What each process recorded since the last call."""
        with translated_errors(f"{self.name}.drain_metrics"):
            return [drained for _, drained in (await self._hosts.drain_metrics.call()).items()]

    async def stop(self, provisioner: Provisioner) -> None:
        """Asks the actor to tear down, then ends its processes, willing or not."""
        try:
            if self._pids:
                with translated_errors(f"{self.name}.teardown"):
                    await asyncio.wait_for(_call(self._hosts.teardown), timeout=2)
        except (ActorFailure, TimeoutError) as error:
            logger.debug("%s did not tear down: %s", self.name, error)
        except ForgeError as error:
            logger.warning("%s failed in teardown: %s", self.name, error)
        finally:
            await provisioner.release(self._placement, self._pids)


async def _call(endpoint: Any) -> None:
    await endpoint.call()
