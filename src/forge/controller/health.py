"""Health: which replicas still answer."""

import asyncio
from collections.abc import Callable, Iterable

from forge.controller.replica import Replica, ReplicaState
from forge.errors import ReplicaLost


class HealthWatch:
    """Asks replicas for a sign of life: an endpoint of their host that waits behind no call."""

    def __init__(self, report_lost: Callable[[int, int, str], None]) -> None:
        self._report_lost = report_lost  # index, generation, reason
        self._probed: set[int] = set()  # replicas that have not answered yet

    async def refresh(self, replicas: Iterable[Replica], patience_s: float = 1.0) -> None:
        """Brings the pulses up to date, of those that answer soon."""
        await asyncio.gather(*(self.probe(replica, patience_s) for replica in replicas))

    async def probe(self, replica: Replica, patience_s: float, *, is_fatal: bool = False) -> None:
        """Asks one; when it stays silent, and that is fatal, or when it is gone, reports it as lost."""
        mesh, generation = replica.mesh, replica.generation
        if replica.state is not ReplicaState.HEALTHY or mesh is None or replica.index in self._probed:
            return
        self._probed.add(replica.index)
        probe = asyncio.ensure_future(mesh.probe())
        try:
            for _ in range(2):  # the second time because this process itself may have been held up
                done, _ = await asyncio.wait({probe}, timeout=patience_s / 2)
                if done:
                    replica.pulse = probe.result()[0]  # rank 0's, which serves every call
                    return
            if is_fatal:
                reason = f"its event loop did not answer for {patience_s:g} s"
                self._report_lost(replica.index, generation, reason)
        except ReplicaLost as error:
            self._report_lost(replica.index, generation, str(error))
        finally:
            self._probed.discard(replica.index)
            probe.cancel()
