"""Replica: one mesh of a service, with its load and its state."""

from enum import Enum
from typing import Any

from forge.controller.mesh import Mesh
from forge.errors import ReplicaLost


class ReplicaState(Enum):
    """HEALTHY serves calls; LOST has lost its process and serves none."""

    HEALTHY = "healthy"
    LOST = "lost"


class Replica:
    """Counts the calls in flight and notices when the process behind it is gone."""

    def __init__(self, index: int, mesh: Mesh) -> None:
        self.index = index
        self.mesh = mesh
        self.load = 0
        self.state = ReplicaState.HEALTHY

    async def call(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """One routed call to this replica's mesh."""
        self.load += 1
        try:
            return await getattr(self.mesh.handle, method).route(*args, **kwargs)
        except ReplicaLost:
            self.state = ReplicaState.LOST
            raise
        finally:
            self.load -= 1
