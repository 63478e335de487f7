"""Decides which request runs on which replica, and when.

A free slot takes the next request at once: requests pinned to its replica first, then validation, then training, older
groups before younger ones. Routing is by session affinity, then by least load. A replica gets training work only while
its weights are new enough to be trained on, and no work at all until it has flipped in the current pipeline: training
steps of an earlier pipeline may have been undone since.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import count

from headway.engines.base import Request
from headway.rollout.replica import QueuedRequest, Replica, ReplicaHealth, ReplicaLoadIndex, RequestLane, RequestQueue


class RequestRouter:
    """Assigns the slots of all replicas, and queues requests that wait for one."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self.paused: set[RequestLane] = set()
        self.validated: int | None = None
        """Version that validation requests are pinned to; `None`: any."""
        self._index = ReplicaLoadIndex()
        self._lines = {lane: RequestQueue() for lane in RequestLane}
        self._numbers = count()
        self._oldest_useful = 0
        self._sessions: dict[str, Replica] = {}
        self._versions: Counter[int] = Counter()
        """Number of replicas in service by the version they serve."""
        self._counted: dict[Replica, int] = {}

    # -- queries

    @property
    def served(self) -> int:
        """Oldest version that a replica in service answers with; −1 if none is in service."""
        return min(self._versions, default=-1)

    def waiting(self, lane: RequestLane) -> int:
        """Return the number of requests of a lane without a slot."""
        bound = sum(len(replica.pinned) for replica in self.replicas) if lane is RequestLane.TRAIN else 0
        return len(self._lines[lane]) + bound

    def waiting_since_s(self, lane: RequestLane) -> float:
        """Return since when the oldest request of a lane has waited for a slot."""
        pinned = [replica.pinned.oldest_s for replica in self.replicas] if lane is RequestLane.TRAIN else []
        return min([self._lines[lane].oldest_s, *pinned])

    def serves(self, replica: Replica, lane: RequestLane) -> bool:
        """Return whether a request of `lane` may run on a replica now: training needs fresh weights, validation those
        that are validated."""
        if lane in self.paused or not replica.in_service:
            return False
        if lane is RequestLane.TRAIN:
            return replica.version >= self._oldest_useful
        return self.validated is None or replica.version == self.validated

    # -- changes

    def require(self, oldest_useful: int) -> None:
        """Give no training work to replicas that serve anything older than this version."""
        if oldest_useful != self._oldest_useful:
            self._oldest_useful = oldest_useful
            self.refresh_all()

    def refresh_all(self) -> None:
        """Assign free slots after a change that concerns every replica."""
        for replica in self.replicas:
            self.refresh(replica)

    def refresh(self, replica: Replica) -> None:
        """Update a replica in the index and assign its free slots."""
        self._count(replica)
        if not replica.in_service:
            self._index.discard(replica)
            return
        self._index.put(replica)
        while replica in self._index:
            queued = self._next_for(replica)
            if queued is None:
                return
            self._occupy(replica, queued.request_id, queued.lane)
            queued.slot.set_result(replica)

    def withdraw(self, replica: Replica) -> None:
        """Take a replica out of the index. Requests pinned to it may now run anywhere."""
        self.refresh(replica)
        freed = False
        while (queued := replica.pinned.pop()) is not None:
            self._lines[queued.lane].push(queued)
            freed = True
        if freed:
            self.refresh_all()

    # -- slots

    def take(self, request: Request, lane: RequestLane, bound: int | None, avoid: Replica | None) -> Replica | None:
        """Take a free slot if there is one now; on `avoid` only if no other replica has any."""
        pinned = self._pinned(bound, lane)
        replica = pinned or self._sessions.get(request.session)
        if pinned is None and (replica is None or replica is avoid or not self._free(replica, lane)):
            replica = self._index.least(lambda other: other is not avoid and self.serves(other, lane)) or avoid
        if replica is None or not self._free(replica, lane):
            return None
        self._occupy(replica, request.request_id, lane)
        return replica

    async def queue(self, request: Request, lane: RequestLane, priority: int, bound: int | None) -> Replica:
        """Wait for a slot and return its replica."""
        loop = asyncio.get_running_loop()
        slot: asyncio.Future[Replica] = loop.create_future()
        queued = QueuedRequest(priority, next(self._numbers), lane, request.request_id, slot, loop.time())
        pinned = self._pinned(bound, lane)
        (self._lines[lane] if pinned is None else pinned.pinned).push(queued)
        try:
            return await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():  # the slot was granted in the same tick as the cancellation
                self.release(slot.result(), request)
            raise

    def release(self, replica: Replica, request: Request) -> None:
        replica.inflight.pop(request.request_id, None)
        self.refresh(replica)

    def remember(self, session: str, replica: Replica) -> None:
        self._sessions[session] = replica

    def forget(self, session: str) -> None:
        self._sessions.pop(session, None)

    # -- internals

    def _next_for(self, replica: Replica) -> QueuedRequest | None:
        if self.serves(replica, RequestLane.TRAIN) and (queued := replica.pinned.pop()) is not None:
            return queued
        for lane in (RequestLane.VALIDATE, RequestLane.TRAIN):
            if self.serves(replica, lane) and (queued := self._lines[lane].pop()) is not None:
                return queued
        return None

    def _occupy(self, replica: Replica, request_id: str, lane: RequestLane) -> None:
        replica.inflight[request_id] = lane
        self._index.put(replica)

    def _free(self, replica: Replica, lane: RequestLane) -> bool:
        return replica in self._index and self.serves(replica, lane)

    def _pinned(self, bound: int | None, lane: RequestLane) -> Replica | None:
        """Return the replica that a training request is pinned to; `None` while it is out of service. When replicas
        join or leave, later requests may be pinned to other replicas than earlier ones."""
        if bound is None or lane is not RequestLane.TRAIN:
            return None
        replica = self.replicas[bound % len(self.replicas)]
        return replica if replica.health is ReplicaHealth.UP and not replica.devices_reclaimed else None

    def _count(self, replica: Replica) -> None:
        """Update the counts by version, so that `served` need not look at every replica."""
        now = replica.version if replica.in_service else -1
        before = self._counted.get(replica, -1)
        if now != before:
            self._counted[replica] = now
            for version, change in ((before, -1), (now, 1)):
                if version >= 0:
                    self._versions[version] += change
                    if not self._versions[version]:
                        del self._versions[version]
