"""[4] Turns: callers who wait until they may go on, first come, first served."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Turn:
    may_go: Callable[[], bool]
    callers: list["asyncio.Future[None]"] = field(default_factory=list)  # the same call, as often as it came


class Turns:
    """Only the first in the queue is asked whether it may go: what happens costs the same however many wait.

    After all that may let somebody go, say `wake`. Whoever goes on must do, before it awaits anything, what
    takes from the next what let it go, and say `wake` then.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[object, _Turn] = OrderedDict()

    async def wait(self, call: str | None, may_go: Callable[[], bool]) -> None:
        """Returns when all that came before are gone, and `may_go`. A call that comes again has the turn that
        it had."""
        if not self._queue and may_go():
            return
        key = object() if call is None else call
        turn = _Turn(may_go)
        try:
            while True:
                turn = self._queue.setdefault(key, turn)
                turn.callers.append(caller := asyncio.get_running_loop().create_future())
                self.wake()
                await caller
                if may_go():
                    break
        except BaseException:  # cancelled
            self._leave(key, turn)
            self.wake()
            raise
        self._leave(key, turn)

    def wake(self) -> None:
        """Lets the first go on if it may."""
        turn = next(iter(self._queue.values()), None)
        if turn is not None and turn.may_go():
            for caller in turn.callers:
                if not caller.done():
                    caller.set_result(None)

    def _leave(self, key: object, turn: _Turn) -> None:
        turn.callers = [caller for caller in turn.callers if not caller.done()]
        if not turn.callers:
            self._queue.pop(key, None)
