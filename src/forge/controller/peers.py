"""Peers: all processes of one actor, as the actor itself calls them."""

from typing import Any

from forge.controller._monarch import ValueMesh
from forge.controller.actor import ForgeActor, endpoint_of
from forge.controller.call import ledger, waiting
from forge.controller.lane import Lane, LaneLost, Member
from forge.errors import ReplicaLost


class Peers:
    """The actor's own mesh: `await self.peers.step.call(x)` runs the endpoint `step` on every rank."""

    def __init__(self, cls: type[ForgeActor], member: Member, name: str) -> None:
        self._cls = cls
        self._name = name
        self._lane = Lane(member)

    def __getattr__(self, name: str) -> "PeerEndpoint":
        if name.startswith("_"):
            raise AttributeError(name)
        endpoint_of(self._cls, name)
        return PeerEndpoint(self._lane, self._name, name)


class PeerEndpoint:
    """One endpoint of the actor's own mesh."""

    def __init__(self, lane: Lane, name: str, method: str) -> None:
        self._lane = lane
        self._name = name
        self._method = method

    async def call(self, *args: Any, **kwargs: Any) -> ValueMesh:
        """Runs on every process, this one included; a mesh of (point, value) in rank order."""
        with waiting(self._name, self._method) as call:
            try:
                return await self._lane.call_peers(call.id, ledger.actor, self._method, args, kwargs)
            except LaneLost as error:
                raise ReplicaLost(
                    f"{self._name}.{self._method}: a process of this actor is gone ({error})"
                ) from None
