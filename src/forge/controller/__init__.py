"""Infrastructure, out of sight of the algorithm: actors, services, placement, life cycle."""

from forge.controller.actor import ForgeActor, endpoint
from forge.controller.call import call_id
from forge.controller.handle import ActorHandle
from forge.controller.runtime import Runtime
from forge.controller.service import Service

__all__ = ["ActorHandle", "ForgeActor", "Runtime", "Service", "call_id", "endpoint"]
