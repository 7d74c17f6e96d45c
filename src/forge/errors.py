"""Every error that forge raises on purpose: one message with the rule, the value and the fix."""

from collections.abc import Sequence
from typing import Any


class ForgeError(Exception):
    """Base of all errors that forge raises. Takes one message, so that it can travel between actors."""

    exit_code = 1


class ConfigError(ForgeError):
    """The user asked for something that can't be: an unknown key, a wrong type, an impossible value."""

    exit_code = 2


class NotEnoughGPUs(ConfigError):
    """More GPUs are asked for than are free."""


class AssetError(ConfigError):
    """A model folder, GGUF file or tokenizer can't be found or is incomplete."""


class DatasetError(ConfigError):
    """A dataset can't be found, is empty, or has no such column."""


class PromptTooLong(ForgeError):
    """A prompt has more tokens than the engine takes."""


class RewardError(ForgeError):
    """A reward function raised or gave no finite number; the message names the function and the prompt."""


class ActorFailure(ForgeError):
    """An actor or all replicas of a service can't serve."""


class ReplicaLost(ActorFailure):
    """The process of a replica is gone."""


class ReplicaUnfit(ActorFailure):
    """A replica must not serve, though its process lives: its calls go to others, and it is replaced."""


class CallTimeout(ForgeError, TimeoutError):
    """A call was not done by its deadline; it has been cancelled."""


class RunStalled(ForgeError):
    """Nothing has moved for a long time; who waits for whom was printed before."""

    exit_code = 3


class FanoutError(ActorFailure):
    """Replicas failed in a fanout; the message names each, `results` holds the others' by index."""

    results: dict[int, Any] = {}  # noqa: RUF012 - replaced, never changed


class NotFinite(ForgeError):
    """A loss or gradient is NaN or infinite; the weights are those of before on every rank."""

    def __init__(self, message: str, episode_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.episode_ids = list(episode_ids)  # of those that it comes from, as far as they have names


class InvariantBroken(ForgeError):
    """What always holds in a sound run does not, and the configuration says that it ends then (`checks`)."""

    def __init__(self, message: str, episode_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.episode_ids = list(episode_ids)  # of those that break it


class WeightsMissing(ForgeError):
    """A version of the weights was asked for that is not, or no longer, in the store."""


class WeightsMismatch(ForgeError):
    """Weights that arrived differ from those that were published: name, shape, dtype or fingerprint."""
