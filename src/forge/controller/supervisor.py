"""Supervisor: keeps the replicas of one service alive, current, and as many as wanted. Lives in the root."""

import asyncio
import contextvars
import logging
import math
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.controller.dispatcher import Dispatcher, Roster
from forge.controller.host import Seat
from forge.controller.lane import Member
from forge.controller.ledger import Demand
from forge.controller.mesh import Mesh
from forge.controller.provisioner import Provisioner
from forge.controller.replica import MAX_FAILURES, Replica, ReplicaState, ReplicaStatus
from forge.errors import ConfigError, ForgeError, ReplicaLost
from forge.observability import metrics

if TYPE_CHECKING:
    from forge.controller.options import ActorOptions

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.1
_IDLE_BEFORE_SHRINKING_S = 10.0


class Supervisor:
    """Starts replicas from one recipe, replaces those that die or hang, and tells callers who is there."""

    def __init__(
        self,
        uid: str,
        options: "ActorOptions[Any]",
        args: tuple,
        kwargs: dict[str, Any],
        *,
        provisioner: Provisioner,
        run_dir: Path,
        heals: bool,
    ) -> None:
        self.uid = uid
        self.options = options
        self.num_fanouts = 0
        self.dispatcher = Dispatcher(
            options.name,
            options.router,
            max_concurrent=options.max_concurrent,
            down_timeout_s=options.down_timeout_s,
            report_lost=lambda member, reason: self.report_lost(member.index, member.generation, reason),
        )
        self._args, self._kwargs = args, kwargs
        self._provisioner = provisioner
        self._demand = Demand.of(options)
        self._run_dir = run_dir
        self._heals = heals
        self._replicas: dict[int, Replica] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = contextvars.copy_context()  # Monarch's threads report losses in theirs
        self._changed = asyncio.Event()  # of one roster; each has its own
        self._idle_polls = 0
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
        await asyncio.gather(*(mesh.teardown() for mesh in self._meshes()))

    async def stop(self) -> None:
        """Ends all processes, and everything that goes on here."""
        self._close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        outcomes = await asyncio.gather(
            *(mesh.stop(self._provisioner) for mesh in self._meshes()), return_exceptions=True
        )
        for replica in self._replicas.values():
            self._provisioner.give_back(replica.place)
        self._replicas.clear()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def scale(self, num_replicas: int) -> None:
        """Goes to so many replicas; new ones take calls when this returns, those that go finish theirs."""
        if num_replicas < 1:
            raise ConfigError(f"{self.options.name}: scale needs at least 1 replica, got {num_replicas}")
        present = [r for r in self._replicas.values() if r.state is not ReplicaState.DRAINING]
        if num_replicas > len(present):
            await self._grow(num_replicas - len(present))
        else:
            leaving = sorted(present, key=lambda replica: replica.index)[num_replicas:]
            await asyncio.gather(*(self._drain(replica) for replica in leaving))

    # -- what is seen ----------------------------------------------------------------------------------------

    async def replicas(self) -> list[ReplicaStatus]:
        """State, version, load and restarts of each, as of now."""
        healthy = [r for r in self._replicas.values() if r.state is ReplicaState.HEALTHY and not r.is_probed]
        await asyncio.gather(*(self._probe(r, patience_s=1.0) for r in healthy))
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
        replica.count_loss(self._num_answered(replica))
        if replica.state is ReplicaState.DRAINING:  # it was about to go anyway
            replica.state = ReplicaState.LOST
            return
        replica.state = ReplicaState.LOST
        self._publish()
        if self._heals:
            logger.warning("%s: replica %d is gone (%s): replacing it", self.options.name, index, reason)
            self._spawn(self._replace(replica))
        else:
            logger.warning("%s is gone (%s)", self.options.name, reason)
            self._spawn(self._bury(replica))

    def note_fault(self, mesh_name: str, reason: str) -> bool:
        """Monarch saw a process die; whether it was one of ours."""
        for replica in self._replicas.values():
            if replica.mesh is not None and replica.mesh.name == mesh_name:
                self.report_lost(replica.index, replica.generation, reason)
                return True
        return False

    # -- replicas come and go --------------------------------------------------------------------------------

    async def _grow(self, num: int) -> None:
        places = self._provisioner.reserve(self._demand, num)
        free = (i for i in range(len(self._replicas) + num) if i not in self._replicas)
        new = [Replica(index, place) for place, index in zip(places, free, strict=False)]
        self._replicas.update({replica.index: replica for replica in new})
        outcomes = await asyncio.gather(*(self._bring_up(replica) for replica in new), return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            for replica in new:
                await self._remove(replica)
            raise errors[0]

    async def _bring_up(self, replica: Replica) -> None:
        """LOADING -> SYNCED -> HEALTHY. No fanout can slip in between the last check and the first call."""
        replica.state = ReplicaState.LOADING
        seat = Seat(
            self.options.name,
            replica.index,
            replica.generation,
            self._run_dir / self.uid / str(replica.index),
            self.options.max_concurrent,
        )
        mesh = await Mesh.start(
            self._provisioner,
            self.options,
            seat,
            replica.place,
            self._args,
            self._kwargs,
            run_dir=self._run_dir,
        )
        try:
            num_seen = -1
            while num_seen != self.num_fanouts:
                num_seen = self.num_fanouts
                async with asyncio.timeout(self.options.start_timeout_s):
                    await mesh.catch_up()
                replica.state = ReplicaState.SYNCED
        except BaseException:
            await mesh.kill(self._provisioner)
            raise
        replica.mesh = mesh
        replica.become_healthy()
        self._publish()

    async def _replace(self, replica: Replica) -> None:
        """Until a new process has taken the place of the dead one, or too many have died of it."""
        await self._bury(replica)
        while replica.failures < MAX_FAILURES:
            await asyncio.sleep(replica.backoff_s())
            replica.generation += 1
            suspect = replica.failures >= 2  # it may be the device
            try:
                replica.place = await self._provisioner.move(self._demand, replica.place, is_suspect=suspect)
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
        logger.error("%s is degraded: replica %d %s", self.options.name, replica.index, reason)
        self._publish()

    async def _bury(self, replica: Replica) -> None:
        mesh, replica.mesh = replica.mesh, None
        if mesh is not None:
            await mesh.kill(self._provisioner)

    async def _drain(self, replica: Replica) -> None:
        """Takes no new calls, finishes those it has, and goes."""
        was_healthy = replica.state is ReplicaState.HEALTHY
        replica.state = ReplicaState.DRAINING
        self._publish()
        while was_healthy and replica.state is ReplicaState.DRAINING:
            assert replica.mesh is not None
            try:
                pulses = await replica.mesh.probe()
            except ReplicaLost:
                break
            if not any(pulse.num_running for pulse in pulses):
                break
            await asyncio.sleep(_DRAIN_POLL_S)
        await self._remove(replica)

    async def _remove(self, replica: Replica) -> None:
        self._replicas.pop(replica.index, None)
        if replica.mesh is not None:
            await replica.mesh.stop(self._provisioner)
        self._provisioner.give_back(replica.place)

    # -- the watch -------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Probes every replica, and follows the queue where the number of replicas may change."""
        while True:
            await asyncio.sleep(self.options.health_poll_rate)
            for replica in self._replicas.values():
                if replica.state is ReplicaState.HEALTHY and not replica.is_probed:
                    self._spawn(self._probe(replica, patience_s=self.options.health_timeout_s, is_fatal=True))
            if self.options.max_replicas is not None:
                self._follow_queue()

    async def _probe(self, replica: Replica, *, patience_s: float, is_fatal: bool = False) -> None:
        """Asks a replica for a sign of life. One that gives none, and whose silence is fatal, is replaced."""
        mesh, generation = replica.mesh, replica.generation
        if mesh is None:
            return
        replica.is_probed = True
        probe = asyncio.ensure_future(mesh.probe())
        try:
            for _ in range(2):  # the second time because this process itself may have been held up
                done, _ = await asyncio.wait({probe}, timeout=patience_s / 2)
                if done:
                    pulses = probe.result()
                    replica.pulse = pulses[0]  # rank 0 serves every call
                    return
            if is_fatal:
                reason = f"its event loop did not answer for {patience_s:g} s"
                self.report_lost(replica.index, generation, reason)
        except ReplicaLost as error:
            self.report_lost(replica.index, generation, str(error))
        finally:
            replica.is_probed = False
            probe.cancel()

    def _follow_queue(self) -> None:
        """One replica more while calls wait; one less when the rest could have done all for a while."""
        low, high, limit = self.options.min_replicas, self.options.max_replicas, self.options.max_concurrent
        assert low is not None and high is not None and limit is not None
        present = [r for r in self._replicas.values() if r.state is not ReplicaState.DRAINING]
        if any(r.state in (ReplicaState.LOADING, ReplicaState.SYNCED) for r in present):
            return
        running = sum(replica.pulse.num_running for replica in present)
        needed = math.ceil((running + self.dispatcher.num_waiting) / limit)
        if needed > len(present) and len(present) < high:
            self._idle_polls = 0
            self._spawn(self._scale_logged(len(present) + 1))
        elif needed < len(present) and len(present) > low:
            self._idle_polls += 1
            if self._idle_polls * self.options.health_poll_rate >= _IDLE_BEFORE_SHRINKING_S:
                self._idle_polls = 0
                self._spawn(self._scale_logged(len(present) - 1))
        else:
            self._idle_polls = 0

    async def _scale_logged(self, num: int) -> None:
        logger.info("%s: going to %d replicas", self.options.name, num)
        try:
            await self.scale(num)
        except (ForgeError, TimeoutError) as error:
            logger.warning("%s: could not go to %d replicas: %s", self.options.name, num, error)

    # -- small things ----------------------------------------------------------------------------------------

    def _meshes(self) -> list[Mesh]:
        return [replica.mesh for replica in self._replicas.values() if replica.mesh is not None]

    def _num_answered(self, replica: Replica) -> int:
        return sum(lane.num_done for lane in self.dispatcher.lanes if lane.index == replica.index)

    def _publish(self) -> None:
        """Tells every caller who takes calls now."""
        replicas = [replica for _, replica in sorted(self._replicas.items())]
        takers = [] if self._is_closed else [r for r in replicas if r.state is ReplicaState.HEALTHY]
        members: tuple[Member, ...] = tuple(replica.member for replica in takers)
        coming = (ReplicaState.LOADING, ReplicaState.SYNCED, ReplicaState.LOST)
        roster = Roster(
            self.dispatcher.roster.epoch + 1,
            members,
            is_healing=self._heals and any(r.state in coming for r in replicas),
            reasons=tuple(f"replica {r.index}: {r.reason}" for r in replicas if r.reason),
            is_closed=self._is_closed,
        )
        self.dispatcher.update(roster)
        self._changed.set()
        self._changed = asyncio.Event()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._publish()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task of this service; its unexpected end is told."""
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._tell)

    def _tell(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s: supervision failed", self.options.name, exc_info=task.exception())
