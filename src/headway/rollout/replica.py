"""One engine as the hub sees it, and an index of replicas by load that makes routing cheap for thousands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from heapq import heappop, heappush
from typing import NamedTuple

from headway.engines.base import Engine, Progress


class ReplicaHealth(StrEnum):
    """Whether a replica can get work."""

    UP = "up"
    DOWN = "down"
    """It is being restarted."""
    LOST = "lost"
    """Restarts failed too often; it is probed now and then."""
    LEFT = "left"
    """It was removed and does not come back."""


class RequestLane(StrEnum):
    """What a request is for. Lanes are paused independently."""

    TRAIN = "train"
    VALIDATE = "validate"


class QueuedRequest(NamedTuple):
    """A request that waits for a slot. Older groups come first, then earlier requests."""

    priority: int
    number: int
    lane: RequestLane
    request_id: str
    slot: asyncio.Future[Replica]
    since_s: float


class RunningRequest(NamedTuple):
    """A request that an engine works on."""

    deadline: asyncio.Timeout
    """It stops while the engine is paused."""
    progress: Progress
    since_s: float


class RequestQueue:
    """Requests without a slot, in order. Cancelled ones are skipped."""

    def __init__(self) -> None:
        self._heap: list[QueuedRequest] = []

    def push(self, queued: QueuedRequest) -> None:
        heappush(self._heap, queued)

    def pop(self) -> QueuedRequest | None:
        """Remove and return the first request that still waits."""
        while self._heap:
            queued = heappop(self._heap)
            if not queued.slot.done():
                return queued
        return None

    @property
    def oldest_s(self) -> float:
        """The time since which the first of them waits; infinity if there is none."""
        return min((queued.since_s for queued in self._heap if not queued.slot.done()), default=float("inf"))

    def __len__(self) -> int:
        return sum(not queued.slot.done() for queued in self._heap)


class Replica:
    """One engine of the hub, with its load, health and failures."""

    __slots__ = (
        "devices_reclaimed", "engine", "errors", "failures", "flipped_in_pipeline", "health", "incarnation",
        "inflight", "is_paused", "last_failure_s", "last_success_s", "lent", "number", "pause_count", "pinned",
        "remaining_s", "requests_paused", "running",
    )  # fmt: skip

    def __init__(self, engine: Engine, number: int, *, lent: bool = False) -> None:
        self.engine = engine
        self.number = number
        self.health = ReplicaHealth.UP
        self.lent = lent
        """Whether it runs on the trainer's devices."""
        self.devices_reclaimed = False
        """Whether the trainer uses these devices now, so that the replica gets no work."""
        self.requests_paused = False
        """Whether its requests are paused meanwhile; otherwise they continue elsewhere."""
        self.flipped_in_pipeline = False
        """Whether it has flipped in the current pipeline, and so serves nothing older than before."""
        self.incarnation = 0
        """Grows with every failure, so that outcomes of work begun before a failure can be ignored."""
        self.pause_count = 0
        """Number of reasons for which it has to be paused."""
        self.is_paused: bool | None = False
        """Whether the engine is paused. `None`: a change was requested and has not been confirmed."""
        self.inflight: dict[str, RequestLane] = {}
        self.running: dict[str, RunningRequest] = {}
        """Requests in flight that the engine has taken."""
        self.remaining_s: dict[str, float] = {}
        """Remaining seconds of those deadlines while the engine is paused."""
        self.pinned = RequestQueue()
        """Training requests that may run on no other replica (groups that are not replicated)."""
        self.failures = 0
        """Number of failures without a quiet time in between."""
        self.errors = 0
        """Number of requests that failed here in a row."""
        self.last_failure_s = float("-inf")
        self.last_success_s = float("-inf")
        """Time at which a request last ended here."""

    async def apply_pause(self) -> None:
        """Pause the engine if `pause_count` is positive, resume it otherwise."""
        while self.is_paused is not (self.pause_count > 0):
            still = self.pause_count > 0
            self.is_paused = None
            await (self.engine.pause() if still else self.engine.resume())
            self.is_paused = still

    def find_oldest_requests(self) -> dict[RequestLane, tuple[int, str, RunningRequest]]:
        """Return for each lane at work how many requests the engine has, and the oldest of them."""
        found: dict[RequestLane, tuple[int, str, RunningRequest]] = {}
        for request_id, request in self.running.items():
            lane = self.inflight.get(request_id, RequestLane.TRAIN)
            count, oldest_id, oldest = found.get(lane, (0, request_id, request))
            if request.since_s < oldest.since_s:
                oldest_id, oldest = request_id, request
            found[lane] = (count + 1, oldest_id, oldest)
        return found

    @property
    def in_service(self) -> bool:
        """Whether the replica can get work."""
        is_up = self.health is ReplicaHealth.UP and not self.devices_reclaimed
        return is_up and self.flipped_in_pipeline and self.version >= 0

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def load(self) -> int:
        return len(self.inflight)

    @property
    def version(self) -> int:
        return self.engine.receiver.version

    @property
    def checksum(self) -> str:
        """Checksum of the weights that it serves; empty if the engine computes none."""
        return getattr(self.engine.receiver, "checksum", "")


class ReplicaLoadIndex:
    """Finds the least loaded replica in constant time."""

    def __init__(self) -> None:
        self._buckets: list[dict[Replica, None]] = []
        self._where: dict[Replica, int] = {}

    def __contains__(self, replica: Replica) -> bool:
        return replica in self._where

    def put(self, replica: Replica) -> None:
        """Add a replica or update its position. A full replica is left out."""
        self.discard(replica)
        if replica.load >= replica.engine.slots:
            return
        while len(self._buckets) <= replica.load:
            self._buckets.append({})
        self._buckets[replica.load][replica] = None
        self._where[replica] = replica.load

    def discard(self, replica: Replica) -> None:
        load = self._where.pop(replica, None)
        if load is not None:
            del self._buckets[load][replica]

    def least(self, fits: Callable[[Replica], bool]) -> Replica | None:
        """Return the least loaded replica with a free slot that `fits` accepts, or `None`."""
        for bucket in self._buckets:
            for replica in bucket:
                if fits(replica):
                    return replica
        return None
