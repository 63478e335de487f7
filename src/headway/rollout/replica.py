"""One engine as the hub sees it, and an index of replicas by load that makes routing cheap for thousands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from heapq import heappop, heappush
from typing import NamedTuple

from headway.engines.base import Engine


class ReplicaHealth(StrEnum):
    """Whether a replica can be given work."""

    UP = "up"
    DOWN = "down"
    """Being restarted."""
    LOST = "lost"
    """Restarts failed too often; tried again now and then."""
    LEFT = "left"
    """It was let go and does not come back."""


class RequestLane(StrEnum):
    """Who a request works for; lanes are paused independently."""

    TRAIN = "train"
    VALIDATE = "validate"


class QueuedRequest(NamedTuple):
    """A request that waits for a free slot. Older groups go first, then first come."""

    priority: int
    number: int
    lane: RequestLane
    request_id: str
    slot: asyncio.Future[Replica]


class RequestQueue:
    """Requests without a slot, in order; entries whose future is done (cancelled) are skipped."""

    def __init__(self) -> None:
        self._heap: list[QueuedRequest] = []

    def push(self, queued: QueuedRequest) -> None:
        heappush(self._heap, queued)

    def pop(self) -> QueuedRequest | None:
        """The first one still waiting."""
        while self._heap:
            queued = heappop(self._heap)
            if not queued.slot.done():
                return queued
        return None

    def __len__(self) -> int:
        return sum(not queued.slot.done() for queued in self._heap)


class Replica:
    """Load, health and failure count of one engine."""

    __slots__ = (
        "bound",
        "deadlines",
        "devices_reclaimed",
        "engine",
        "errors",
        "failures",
        "flipped_in_pipeline",
        "health",
        "incarnation",
        "inflight",
        "is_paused",
        "last_failure_s",
        "last_success_s",
        "lent",
        "number",
        "pause_count",
        "remaining_s",
        "requests_paused",
    )

    def __init__(self, engine: Engine, number: int, *, lent: bool = False) -> None:
        self.engine = engine
        self.number = number
        self.health = ReplicaHealth.UP
        self.lent = lent
        """Its devices are the trainer's."""
        self.devices_reclaimed = False
        """They are in use there: it is given no work."""
        self.requests_paused = False
        """Its requests stand still meanwhile; otherwise they have gone on elsewhere."""
        self.flipped_in_pipeline = False
        """It has flipped in the line that runs now, and serves nothing older than was served before."""
        self.incarnation = 0
        """Grows with every failure: what was begun in an earlier life is nobody's business any more."""
        self.pause_count = 0
        """How many want it to stand still."""
        self.is_paused: bool | None = False
        """`None`: it was asked to change that and has not answered, or nobody waited for its answer."""
        self.inflight: dict[str, RequestLane] = {}
        self.deadlines: dict[str, asyncio.Timeout] = {}
        """Of the requests in flight; they stand still when the engine does."""
        self.remaining_s: dict[str, float] = {}
        """What was left of them when it was made to."""
        self.bound = RequestQueue()
        """Training requests that may run nowhere else (groups that are not replicated)."""
        self.failures = 0
        """In a row, without a quiet time between."""
        self.errors = 0
        """Requests that failed here, one after the other."""
        self.last_failure_s = float("-inf")
        self.last_success_s = float("-inf")
        """When a request last ended here."""

    async def apply_pause(self) -> None:
        """Stand still if anybody wants that, go on if nobody does."""
        while self.is_paused is not (self.pause_count > 0):
            still = self.pause_count > 0
            self.is_paused = None
            await (self.engine.pause() if still else self.engine.resume())
            self.is_paused = still

    @property
    def in_service(self) -> bool:
        """Whether it can be given work at all."""
        return (
            self.health is ReplicaHealth.UP
            and self.flipped_in_pipeline
            and not self.devices_reclaimed
            and self.version >= 0
        )

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def load(self) -> int:
        return len(self.inflight)

    @property
    def version(self) -> int:
        return self.engine.receiver.version


class ReplicaLoadIndex:
    """Replicas that may be given work, by load: the least loaded one in constant time."""

    def __init__(self) -> None:
        self._buckets: list[dict[Replica, None]] = []
        self._where: dict[Replica, int] = {}

    def __contains__(self, replica: Replica) -> bool:
        return replica in self._where

    def put(self, replica: Replica) -> None:
        """Add, or move to where its load belongs; a full replica is left out."""
        self.discard(replica)
        if replica.load >= replica.engine.slots:
            return
        while len(self._buckets) <= replica.load:
            self._buckets.append({})
        self._buckets[replica.load][replica] = None
        self._where[replica] = replica.load

    def discard(self, replica: Replica) -> None:
        """Remove, if there."""
        load = self._where.pop(replica, None)
        if load is not None:
            del self._buckets[load][replica]

    def least(self, fits: Callable[[Replica], bool]) -> Replica | None:
        """The least loaded replica with a free slot that fits, the one that has been so for longest."""
        for bucket in self._buckets:
            for replica in bucket:
                if fits(replica):
                    return replica
        return None
