"""Mesh: the processes of one actor or one replica, from start to stop."""

import asyncio
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.controller._monarch import ActorError, SupervisionError
from forge.controller.host import ActorHost, Pulse, Seat
from forge.controller.lane import cause_of_death
from forge.controller.ledger import Place
from forge.controller.provisioner import Placement, Provisioner
from forge.controller.witness import RUN_DIR_VARIABLE
from forge.errors import ActorFailure, ReplicaLost
from forge.observability import metrics

if TYPE_CHECKING:
    from forge.controller.options import ActorOptions

logger = logging.getLogger(__name__)
_serial = itertools.count()
_TEARDOWN_S = 2.0


class Mesh:
    """A started actor: its processes, and how to end them."""

    def __init__(self, name: str, placement: Placement, hosts: Any) -> None:
        self.name = name  # by which Monarch reports its faults
        self.hosts = hosts
        self.pids: list[int] = []
        self._placement = placement
        self._is_torn_down = False

    @classmethod
    async def start(
        cls,
        provisioner: Provisioner,
        options: "ActorOptions[Any]",
        seat: Seat,
        place: Place,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        run_dir: Path,
    ) -> "Mesh":
        """Spawns the processes, constructs the actor in each, runs `setup`; on any error nothing is left."""
        name = f"{options.name}_{next(_serial)}"
        env = {
            **options.cls.bootstrap_env(),
            RUN_DIR_VARIABLE: str(run_dir),
        }
        env |= options.env or {}
        placement = provisioner.spawn(name, place, compute_bound=options.cls.compute_bound, env=env)
        mesh = cls(name, placement, placement.spawn(name, ActorHost, options.name))
        deadline = asyncio.timeout(options.start_timeout_s)
        try:
            async with deadline:
                with translated_errors(f"{name}.start"):
                    mesh.pids = [pulse.pid for pulse in await provisioner.arrival(placement, mesh.probe())]
                    await mesh.hosts.construct.call(options.cls, args, kwargs, seat, mesh.hosts)
                    await mesh.hosts.setup.call()
        except BaseException as error:
            await mesh.stop(provisioner)
            if isinstance(error, TimeoutError) and deadline.expired():
                raise ActorFailure(
                    f"{options.name}: replica {seat.replica} had not started after "
                    f"{options.start_timeout_s:g} s: raise start_timeout_s, or see what it waits for"
                ) from None
            raise
        return mesh

    async def catch_up(self) -> None:
        """Lets every rank bring itself up to date."""
        with translated_errors(f"{self.name}.catch_up"):
            await self.hosts.catch_up.call()

    async def probe(self) -> list[Pulse]:
        """What every rank answers to a health probe."""
        with translated_errors(f"{self.name}.probe"):
            return [pulse for _, pulse in (await self.hosts.probe.call()).items()]

    async def drain_metrics(self) -> list[dict[str, metrics.Stat]]:
        """What each process recorded since the last call; nothing from processes that are gone."""
        try:
            with translated_errors(f"{self.name}.drain_metrics"):
                return [drained for _, drained in (await self.hosts.drain_metrics.call()).items()]
        except ReplicaLost:  # its supervisor says so
            return []

    async def teardown(self) -> None:
        """Asks the actor to free what it holds."""
        if not self.pids or self._is_torn_down:
            return
        self._is_torn_down = True
        try:
            with translated_errors(f"{self.name}.teardown"):
                await asyncio.wait_for(_call(self.hosts.teardown), _TEARDOWN_S)
        except (ReplicaLost, TimeoutError) as error:
            logger.debug("%s did not tear down: %s", self.name, error)
        except Exception as error:  # the actor's own; the processes must end all the same
            logger.warning("%s failed in teardown: %s: %s", self.name, type(error).__name__, error)

    async def stop(self, provisioner: Provisioner) -> None:
        """Tears down, then ends the processes, willing or not."""
        await self.teardown()
        await provisioner.release(self._placement, self.pids)

    async def kill(self, provisioner: Provisioner) -> None:
        """Ends the processes at once."""
        await provisioner.release(self._placement, self.pids, kill=True)


@contextmanager
def translated_errors(call: str) -> Iterator[None]:
    """Monarch's errors as the caller should see them: the endpoint's own exception, or ReplicaLost."""
    try:
        yield
    except ActorError as error:
        raise error.exception from None
    except SupervisionError as error:
        raise ReplicaLost(f"{call}: the process is gone ({cause_of_death(error)})") from None


async def _call(endpoint: Any) -> None:
    await endpoint.call()
