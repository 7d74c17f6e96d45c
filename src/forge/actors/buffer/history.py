"""[4] History: what a replay buffer remembers of what is over."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from forge.data_models import Episode

# So much is remembered: far more than the calls that a lost process can have been serving.
REMEMBERED_CALLS = 4096
REMEMBERED_BATCHES = 4  # one is asked for at a time
REMEMBERED_EPISODES = 2**16  # an episode that comes back still later is past its age


@dataclass(frozen=True, slots=True)
class Batch:
    """Episodes that were taken together, by number, and the trainer's version then."""

    episodes: tuple[Episode, ...]
    version: int


@dataclass(slots=True)
class History:
    """Calls that have had their effect, with what they got, and episodes that have left; the newest of each.

    `call` is the id of a call; None: it has none, and is never made again.
    """

    _answers: OrderedDict[str, int | None] = field(default_factory=OrderedDict)  # numbers given, by call
    _batches: OrderedDict[str | None, Batch] = field(default_factory=OrderedDict)  # by call
    _gone: OrderedDict[str, None] = field(default_factory=OrderedDict)  # episode ids

    def is_done(self, call: str | None) -> bool:
        """Whether this call has had its effect."""
        return call in self._answers

    def answer_of(self, call: str | None) -> int | None:
        """The number that a call was given which is done; None: none."""
        return self._answers.get(call) if call is not None else None

    def batch_of(self, call: str | None) -> Batch | None:
        """What the call took, as long as that is remembered."""
        return self._batches.get(call)

    @property
    def newest_batch(self) -> Batch | None:
        """What was taken last; None before anything was, and after a state was loaded."""
        return next(reversed(self._batches.values()), None)

    @property
    def gone(self) -> list[str]:
        """Ids of episodes that have left, the newest last."""
        return list(self._gone)

    def has_left(self, episode_id: str) -> bool:
        """Whether an episode was here."""
        return episode_id in self._gone

    def note_done(self, call: str | None, answer: int | None) -> None:
        """This call has had its effect."""
        if call is not None:
            self._answers[call] = answer
            _forget_oldest(self._answers, REMEMBERED_CALLS)

    def note_batch(self, call: str | None, batch: Batch) -> None:
        """This call took it."""
        self._batches[call] = batch
        self._batches.move_to_end(call)
        _forget_oldest(self._batches, REMEMBERED_BATCHES)

    def note_gone(self, episode_ids: Iterable[str]) -> None:
        """These have left for good."""
        for id in episode_ids:
            self._gone[id] = None
        _forget_oldest(self._gone, REMEMBERED_EPISODES)

    def load(self, gone: Iterable[str]) -> None:
        """Episodes are those of a state; calls are those of this process."""
        self._gone = OrderedDict.fromkeys(gone)
        self._batches.clear()


def _forget_oldest(memory: OrderedDict, limit: int) -> None:
    while len(memory) > limit:
        memory.popitem(last=False)
