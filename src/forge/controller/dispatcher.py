"""Dispatcher: from a call to the answer of a replica: queue, choice, second attempt, deadline."""

import asyncio
import contextlib
import copy
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from forge.controller.call import Outgoing, waiting
from forge.controller.lane import Lane, LaneLost, Member
from forge.controller.router import Router
from forge.controller.session import Session
from forge.errors import ActorFailure, CallTimeout, ForgeError, ReplicaLost, ReplicaUnfit

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 8  # replicas that one call may be lost with; it may be what kills them

Send = Callable[[Lane, Outgoing], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Roster:
    """The replicas of a service that take calls, and what is to be said of the others."""

    epoch: int  # grows with each change
    members: tuple[Member, ...] = ()
    num_coming: int = 0  # replicas that start, for the first time or in place of lost ones
    reasons: tuple[str, ...] = ()  # why replicas are not there, one line each
    is_closed: bool = False
    heals: bool = True  # whether lost replicas are replaced


@dataclass(slots=True)
class _Waiter:
    session: Session | None
    granted: asyncio.Future[Lane]


class Dispatcher:
    """One process's view of a service. Calls wait in one queue, first come, first served."""

    def __init__(
        self,
        name: str,
        router: Router,
        *,
        max_concurrent: int | None,
        down_timeout_s: float,
        report_lost: Callable[[Member, str], None],
    ) -> None:
        self.name = name
        self.roster = Roster(0)
        self.lanes: list[Lane] = []  # to the roster's members, but for those that were lost since
        self._router = copy.deepcopy(router)  # its own turns
        self._max_concurrent = max_concurrent
        self._down_timeout_s = down_timeout_s
        self._report_lost = report_lost
        self._queue: deque[_Waiter] = deque()
        self._down_timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()  # of one roster; each has its own
        self._num_unconfirmed = 0  # lost replicas that no roster has spoken of yet
        self._loop: asyncio.AbstractEventLoop | None = None  # of all calls

    @property
    def num_waiting(self) -> int:
        """Calls without a replica."""
        return len(self._queue)

    def update(self, roster: Roster) -> None:
        """Goes on with other replicas. Calls in flight on those that leave end as they may."""
        if roster.epoch <= self.roster.epoch:
            return
        self.roster = roster
        self._num_unconfirmed = 0
        leaving = {(lane.index, lane.member.generation): lane for lane in self.lanes}
        lanes = [leaving.pop((m.index, m.generation), None) or Lane(m) for m in roster.members]
        self.lanes = [lane for lane in lanes if lane.is_open]
        for lane in leaving.values():
            lane.is_open = False
            if not lane.load:
                lane.close()
        self._changed.set()
        self._changed = asyncio.Event()
        self._settle()

    async def run(
        self,
        method: str,
        send: Send,
        *,
        session: Session | None = None,
        retry: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Sends a call to one replica; again, to another one, when it is lost and `retry` says so.

        Raises what the endpoint raised; ReplicaLost; ActorFailure when there is no replica; CallTimeout.
        """
        with waiting(self.name, method) as call:
            if timeout_s is None:
                return await self._attempts(call, send, session, retry)
            async with _deadline(call, timeout_s):
                return await self._attempts(call, send, session, retry)

    async def run_on(self, lane: Lane, method: str, send: Send, timeout_s: float | None) -> Any:
        """Sends a call to this very replica, once. Raises LaneLost when it is gone."""
        with waiting(self.name, method) as call:
            async with _deadline(call, timeout_s):
                lane.load += 1
                return await self._attempt(lane, call, send)

    async def reachable(self, method: str, timeout_s: float | None, *, all_of_them: bool) -> None:
        """Waits until a replica takes calls, or with `all_of_them` until none is about to come back."""
        if self.lanes and not (all_of_them and self.roster.num_coming):
            return
        with waiting(self.name, method) as call:
            async with _deadline(call, timeout_s):
                self._release(await self._acquire(None))
                if all_of_them:
                    await self._all_back()

    async def _all_back(self) -> None:
        deadline = asyncio.timeout(self._down_timeout_s)
        try:
            async with deadline:
                while self.roster.num_coming:
                    await self._changed.wait()
        except TimeoutError:
            if not deadline.expired():
                raise
            reasons = "; ".join(self.roster.reasons)
            raise ActorFailure(
                f"{self.name}: {self.roster.num_coming} replicas did not come back within "
                f"{self._down_timeout_s:g} s: {reasons}"
            ) from None

    async def _attempts(self, call: Outgoing, send: Send, session: Session | None, retry: bool) -> Any:
        while True:
            lane = await self._acquire(session)
            try:
                return await self._attempt(lane, call, send)
            except LaneLost as loss:
                if not (retry or loss.is_unfit) or call.attempt == MAX_ATTEMPTS:
                    raise ReplicaLost(_told(call, lane, loss, retry)) from None
            call.attempt += 1
            call.replica = call.pid = None

    async def _attempt(self, lane: Lane, call: Outgoing, send: Send) -> Any:
        call.replica, call.pid = lane.index, lane.member.pid
        try:
            answer = await self._sent(lane, call, send)
            lane.num_done += 1
            return answer
        except LaneLost as loss:
            if lane.is_open:
                lane.is_open = False
                self._num_unconfirmed += 1
                self._report_lost(lane.member, str(loss))
                self.lanes = [other for other in self.lanes if other is not lane]
            raise
        finally:
            self._release(lane)

    async def _sent(self, lane: Lane, call: Outgoing, send: Send) -> Any:
        """A replica that declares itself unfit is as good as lost, where another one takes its place.

        One that isn't replaced stays, and may become fit again. Its caller, which may be a replica itself,
        gets a plain ActorFailure: it is not unfit.
        """
        try:
            return await send(lane, call)
        except ReplicaUnfit as unfit:
            if not self.roster.heals:
                raise ActorFailure(str(unfit)) from None
            loss = LaneLost(str(unfit).splitlines()[0])
            loss.is_unfit = True
            raise loss from None

    async def _acquire(self, session: Session | None) -> Lane:
        """A replica with a place for this call, which `_release` gives back."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop and self._loop is not None:
            raise ForgeError(
                f"{self.name} belongs to the event loop that used it first: use one asyncio.run, and "
                "asyncio.run_coroutine_threadsafe from other threads"
            )
        self._loop = loop
        lane = None if self._queue else self._free_lane(session)
        if lane is not None:
            lane.load += 1
            return lane
        waiter = _Waiter(session, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self._settle()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled() and not waiter.granted.exception():
                self._release(waiter.granted.result())
            raise

    def _release(self, lane: Lane) -> None:
        lane.load -= 1
        if not lane.is_open and not lane.load:
            lane.close()
        if self._queue:
            self._settle()

    def _settle(self) -> None:
        """Gives places to those who wait, in their order; tells them when there will be none."""
        stuck: list[_Waiter] = []
        while self._queue:
            waiter = self._queue.popleft()
            if waiter.granted.done():  # its caller has gone
                continue
            try:
                lane = self._free_lane(waiter.session)
            except Exception as error:  # a user's router failed: told to whom it was to serve
                waiter.granted.set_exception(error)
                continue
            if lane is not None:
                lane.load += 1
                waiter.granted.set_result(lane)
                continue
            stuck.append(waiter)
            if waiter.session is None or waiter.session.lane is None:
                break  # nothing is free: those behind can't have a place either
        self._queue.extendleft(reversed(stuck))
        if self._queue and not self.lanes:
            self._despair()
        elif self._down_timer is not None:
            self._down_timer.cancel()
            self._down_timer = None

    def _despair(self) -> None:
        """There is no replica: fails those who wait, at once when none will come, else in a while."""
        if self.roster.is_closed or not (self.roster.num_coming or self._num_unconfirmed):
            self._fail_all("" if self.roster.is_closed else "none is being replaced any more")
        elif self._down_timer is None:
            self._down_timer = asyncio.get_running_loop().call_later(
                self._down_timeout_s, self._fail_all, f"none came back within {self._down_timeout_s:g} s"
            )

    def _fail_all(self, why: str) -> None:
        self._down_timer = None
        if self.roster.is_closed:
            told = f"{self.name} was shut down"
        else:
            reasons = "; ".join(self.roster.reasons) or "no reason is known"
            told = f"{self.name}: all replicas are down and {why}: {reasons}"
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.granted.done():
                waiter.granted.set_exception(ActorFailure(told))

    def _free_lane(self, session: Session | None) -> Lane | None:
        limit = self._max_concurrent
        if session is not None and session.lane is not None:
            if session.lane.is_open:
                return session.lane if limit is None or session.lane.load < limit else None
            logger.warning(
                "%s: a session moves to another replica, %d is gone", self.name, session.lane.index
            )
            session.lane = None
        free = self.lanes if limit is None else [lane for lane in self.lanes if lane.load < limit]
        if not free:
            return None
        lane = free[self._router.choose(free)]
        if session is not None:
            session.lane = lane
        return lane


def _told(call: Outgoing, lane: Lane, loss: LaneLost, retry: bool) -> str:
    fate = "must not serve" if loss.is_unfit else "is gone"
    told = f"{call.service}.{call.method}: the process of replica {lane.index} {fate} ({loss})"
    if retry:
        told += f", as with {MAX_ATTEMPTS - 1} replicas before: this call may be what kills them"
    return told


@contextlib.asynccontextmanager
async def _deadline(call: Outgoing, timeout_s: float | None) -> AsyncIterator[None]:
    """Cancels the block when its time is over, and says what the call was doing then."""
    if timeout_s is None:
        yield
        return
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise  # the endpoint's own
        where = "waiting for a replica" if call.replica is None else f"at replica {call.replica}"
        raise CallTimeout(
            f"{call.service}.{call.method} was not done within {timeout_s:g} s: it was {where} and has been "
            "cancelled"
        ) from None
