"""[6] Weights: publish, fetch and retire a version of the policy; the only door to TorchStore."""

from forge.weights.store import close_store, open_store
from forge.weights.sync import fetch, publish, retire, unfinished, versions

__all__ = ["close_store", "fetch", "open_store", "publish", "retire", "unfinished", "versions"]
