"""[6] Weights: publish, fetch and retire a version of the policy; the only door to TorchStore."""

from forge.weights.box import Box, box_of
from forge.weights.manifest import Claim, Manifest, Shards, TensorFacts
from forge.weights.push import Push, begin_push, publish
from forge.weights.store import close_store, open_store
from forge.weights.sync import fetch, fetch_shards, newest_lost, retire, unfinished, versions

__all__ = [
    "Box",
    "Claim",
    "Manifest",
    "Push",
    "Shards",
    "TensorFacts",
    "begin_push",
    "box_of",
    "close_store",
    "fetch",
    "fetch_shards",
    "newest_lost",
    "open_store",
    "publish",
    "retire",
    "unfinished",
    "versions",
]
