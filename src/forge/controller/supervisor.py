"""Supervisor: keeps the replicas of one service alive, current, and as many as wanted. Lives in the root."""

import asyncio
import contextvars
import logging
from collections.abc import Coroutine
from typing import Any

from forge.controller.dispatcher import Dispatcher, Roster
from forge.controller.health import HealthWatch
from forge.controller.lane import Member
from forge.controller.recipe import Recipe
from forge.controller.replica import MAX_FAILURES, Replica, ReplicaState, ReplicaStatus
from forge.controller.scaling import QueueFollower
from forge.errors import ActorFailure, ConfigError, ForgeError, ReplicaLost
from forge.observability import metrics

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.1


class Supervisor:
    """Starts replicas from one recipe, replaces those that die or hang, and tells callers who is there."""

    def __init__(
        self,
        uid: str,
        recipe: Recipe,
        *,
        heals: bool,
    ) -> None:
        self.uid = uid
        self.options = options = recipe.options
        self.num_fanouts = 0
        self.dispatcher = Dispatcher(
            options.name,
            options.router,
            max_concurrent=options.max_concurrent,
            down_timeout_s=options.down_timeout_s,
            report_lost=lambda member, reason: self.report_lost(member.index, member.generation, reason),
        )
        self._recipe = recipe
        self.heals = heals
        self._replicas: dict[int, Replica] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = contextvars.copy_context()  # Monarch's threads report losses in theirs
        self._changed = asyncio.Event()  # of one roster; each has its own
        self._health = HealthWatch(self.report_lost)
        self._follower = self._make_follower()
        self._scaling = asyncio.Lock()
        self._is_closed = False

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the first replicas at once; when one fails, raises its error and leaves nothing."""
        try:
            await self._grow(self.options.num_replicas)
        except BaseException:
            await self.stop()
            raise
        self._spawn(self._watch())

    async def teardown(self) -> None:
        """Lets the actors free what they hold; they take no more calls."""
        self._close()
        meshes = [replica.mesh for replica in self._replicas.values() if replica.mesh is not None]
        await asyncio.gather(*(mesh.teardown() for mesh in meshes))

    async def stop(self) -> None:
        """Ends all processes, and everything that goes on here."""
        self._close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        replicas = list(self._replicas.values())
        outcomes = await asyncio.gather(*map(self._recipe.stop, replicas), return_exceptions=True)
        self._replicas.clear()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def scale(self, num_replicas: int) -> None:
        """Goes to so many replicas; new ones take calls when this returns, those that go finish theirs."""
        if num_replicas < 1:
            raise ConfigError(f"{self.options.name}: scale needs at least 1 replica, got {num_replicas}")
        scaling = self._spawn(self._scale(num_replicas), is_watched=False)
        try:
            await scaling
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise ActorFailure(f"{self.options.name} was shut down") from None
            raise

    # -- what is seen ----------------------------------------------------------------------------------------

    async def replicas(self) -> list[ReplicaStatus]:
        """State, version, load and restarts of each, as of now."""
        await self._health.refresh(self._replicas.values())
        return self.statuses()

    def statuses(self) -> list[ReplicaStatus]:
        """The same as of the last health probe."""
        return [replica.status() for _, replica in sorted(self._replicas.items())]

    async def drain_metrics(self) -> list[dict[str, metrics.Stat]]:
        """What the processes recorded since the last call."""
        meshes = [r.mesh for r in self._replicas.values() if r.mesh and r.state is ReplicaState.HEALTHY]
        return [
            part for parts in await asyncio.gather(*(m.drain_metrics() for m in meshes)) for part in parts
        ]

    async def next_roster(self, epoch: int) -> Roster:
        """The roster, as soon as it is newer than `epoch`."""
        while self.dispatcher.roster.epoch <= epoch:
            await self._changed.wait()
        return self.dispatcher.roster

    def begin_fanout(self) -> Roster:
        """A fanout is about to go to the members: replicas that start meanwhile will catch up again."""
        self.num_fanouts += 1
        return self.dispatcher.roster

    def report_lost(self, index: int, generation: int, reason: str) -> None:
        """A caller, Monarch or a health probe found that the process behind a replica is gone."""
        replica = self._replicas.get(index)
        if (
            self._is_closed
            or replica is None
            or replica.generation != generation
            or replica.state not in (ReplicaState.HEALTHY, ReplicaState.DRAINING)
        ):
            return
        replica.reason = reason
        lanes = [lane for lane in self.dispatcher.lanes if lane.index == index]
        replica.count_loss(
            num_answered=sum(lane.num_done for lane in lanes), num_running=sum(lane.load for lane in lanes)
        )
        if replica.state is ReplicaState.DRAINING:  # it was about to go anyway
            replica.state = ReplicaState.LOST
            return
        replica.state = ReplicaState.LOST
        self._publish()
        if self.heals:
            logger.warning("%s: replica %d is gone (%s): replacing it", self.options.name, index, reason)
            replica.healing = self._spawn(self._replace(replica))
        else:
            logger.warning("%s is gone (%s)", self.options.name, reason)
            self._spawn(self._recipe.stop(replica))

    def note_fault(self, mesh_name: str, reason: str) -> bool:
        """Monarch saw a process die; whether it was one of ours."""
        for replica in self._replicas.values():
            if replica.mesh is not None and replica.mesh.name == mesh_name:
                self.report_lost(replica.index, replica.generation, reason)
                return True
        return False

    # -- replicas come and go --------------------------------------------------------------------------------

    async def _scale(self, num_replicas: int) -> None:
        async with self._scaling:
            failed = [r for r in self._replicas.values() if r.state is ReplicaState.FAILED]
            await asyncio.gather(*map(self._remove, failed))
            present = self._present()
            if num_replicas > len(present):
                await self._grow(num_replicas - len(present))
            else:  # first those that serve nobody anyway, then the newest
                present.sort(key=lambda replica: (replica.state is ReplicaState.HEALTHY, -replica.index))
                await asyncio.gather(*map(self._drain, present[: len(present) - num_replicas]))

    async def _grow(self, num: int) -> None:
        places = self._recipe.reserve(num)
        free = (i for i in range(len(self._replicas) + num) if i not in self._replicas)
        new = [Replica(index, place) for place, index in zip(places, free, strict=False)]
        self._replicas.update({replica.index: replica for replica in new})
        try:
            starts = (self._bring_up(replica) for replica in new)
            outcomes = await asyncio.gather(*starts, return_exceptions=True)  # all end before one is told
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
        except BaseException:
            await asyncio.gather(*map(self._drain, new))  # some may have begun to serve
            raise

    async def _bring_up(self, replica: Replica) -> None:
        """No fanout can slip in between the last check and the first call."""
        await self._recipe.bring_up(replica, lambda: self.num_fanouts)
        if self._is_closed:
            raise ActorFailure(f"{self.options.name} was shut down")
        replica.become_healthy()
        self._publish()

    async def _replace(self, replica: Replica) -> None:
        """Until a new process has taken the place of the dead one, or too many have died of it."""
        await self._recipe.bury(replica)
        while replica.failures < MAX_FAILURES:
            await asyncio.sleep(replica.backoff_s())
            replica.generation += 1
            try:
                await self._recipe.move(replica)
            except ConfigError as error:
                replica.reason = str(error)
                return self._give_up(replica, f"finds no place: {error}")
            try:
                await self._bring_up(replica)
            except Exception as error:  # kept as the reason, and counted; logged below
                replica.state = ReplicaState.LOST
                replica.reason = f"{type(error).__name__}: {error}"
                replica.failures += 1
                logger.warning(
                    "%s: replica %d could not be replaced: %s",
                    self.options.name,
                    replica.index,
                    replica.reason,
                )
                continue
            logger.warning("%s: replica %d is back", self.options.name, replica.index)
            return
        self._give_up(
            replica,
            f"died {replica.failures} times in a row without answering a call, last of: {replica.reason}",
        )

    def _give_up(self, replica: Replica, reason: str) -> None:
        replica.state = ReplicaState.FAILED
        self._recipe.give_back(replica)
        logger.error("%s is degraded: replica %d %s", self.options.name, replica.index, reason)
        self._publish()

    async def _drain(self, replica: Replica) -> None:
        """Takes no new calls, finishes those it has, and goes."""
        was_healthy = replica.state is ReplicaState.HEALTHY
        replica.state = ReplicaState.DRAINING
        self._publish()
        while was_healthy and replica.state is ReplicaState.DRAINING:
            await asyncio.sleep(_DRAIN_POLL_S)  # calls that were on their way arrive meanwhile
            if replica.mesh is None:
                break
            try:
                pulses = await asyncio.wait_for(replica.mesh.probe(), self.options.health_timeout_s)
            except (ReplicaLost, TimeoutError):
                break
            if not any(pulse.num_running for pulse in pulses):
                break
        await self._remove(replica)

    async def _remove(self, replica: Replica) -> None:
        self._replicas.pop(replica.index, None)
        if not self._is_closed:
            self._publish()
        if replica.healing is not None:
            replica.healing.cancel()
            await asyncio.gather(replica.healing, return_exceptions=True)
        await self._recipe.stop(replica)

    # -- the watch -------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Probes every replica, and follows the queue where the number of replicas may change."""
        while True:
            await asyncio.sleep(self.options.health_poll_rate)
            for replica in self._replicas.values():
                self._spawn(self._health.probe(replica, self.options.health_timeout_s, is_fatal=True))
            if self._follower is not None and not self._scaling.locked():
                present = self._present()
                running = sum(replica.pulse.num_running for replica in present)
                wanted = self._follower.wanted(len(present), running, self.dispatcher.num_waiting)
                if wanted != len(present):
                    self._spawn(self._scale_logged(wanted))

    async def _scale_logged(self, num: int) -> None:
        logger.info("%s: going to %d replicas", self.options.name, num)
        try:
            await self.scale(num)
        except (ForgeError, TimeoutError) as error:
            logger.warning("%s: could not go to %d replicas: %s", self.options.name, num, error)

    # -- small things ----------------------------------------------------------------------------------------

    def _present(self) -> list[Replica]:
        """Those that serve or will."""
        leaving = (ReplicaState.DRAINING, ReplicaState.FAILED)
        return [replica for replica in self._replicas.values() if replica.state not in leaving]

    def _make_follower(self) -> QueueFollower | None:
        o = self.options
        if o.min_replicas is None or o.max_replicas is None or o.max_concurrent is None:
            return None
        return QueueFollower(o.min_replicas, o.max_replicas, o.max_concurrent, o.health_poll_rate)

    def _publish(self) -> None:
        """Tells every caller who takes calls now."""
        replicas = [replica for _, replica in sorted(self._replicas.items())]
        takers = [] if self._is_closed else [r for r in replicas if r.state is ReplicaState.HEALTHY]
        members: tuple[Member, ...] = tuple(replica.member for replica in takers)
        coming = (ReplicaState.LOADING, ReplicaState.SYNCED, ReplicaState.LOST)
        roster = Roster(
            self.dispatcher.roster.epoch + 1,
            members,
            num_coming=sum(r.state in coming for r in replicas) if self.heals else 0,
            reasons=tuple(f"replica {r.index}: {r.reason}" for r in replicas if r.reason),
            is_closed=self._is_closed,
            heals=self.heals,
        )
        self.dispatcher.update(roster)
        self._changed.set()
        self._changed = asyncio.Event()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._publish()

    def _spawn(self, work: Coroutine[Any, Any, None], *, is_watched: bool = True) -> asyncio.Task[None]:
        """A task of this service, which ends with it; its error is told unless somebody awaits it."""
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if is_watched:
            task.add_done_callback(self._tell)
        return task

    def _tell(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s: supervision failed", self.options.name, exc_info=task.exception())
