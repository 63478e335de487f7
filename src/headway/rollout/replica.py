"""One engine as the hub sees it, and an index of replicas by load that makes routing cheap for thousands."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from headway.engines.base import Engine

if TYPE_CHECKING:
    import asyncio


class Health(StrEnum):
    """Whether a replica can be given work."""

    UP = "up"
    DOWN = "down"
    """Being restarted."""
    LOST = "lost"
    """Restarts failed too often; tried again now and then."""


class Lane(StrEnum):
    """Who a request works for; lanes are paused independently."""

    TRAIN = "train"
    VALIDATE = "validate"


class Queued(NamedTuple):
    """A request that waits for a free slot. Older groups go first, then first come."""

    priority: int
    number: int
    lane: Lane
    request_id: str
    slot: asyncio.Future[Replica]


class Replica:
    """Load, health and failure count of one engine."""

    __slots__ = (
        "bound",
        "engine",
        "failures",
        "health",
        "holds",
        "inflight",
        "last_failure_s",
        "last_success_s",
        "number",
    )

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine = engine
        self.number = number
        self.health = Health.UP
        self.holds = 0
        """How many want it to stand still."""
        self.inflight: dict[str, Lane] = {}
        self.bound: list[Queued] = []
        """Requests that may run nowhere else (groups that are not replicated)."""
        self.failures = 0
        """In a row, without a quiet time between."""
        self.last_failure_s = float("-inf")
        self.last_success_s = float("-inf")
        """When a request last ended here."""

    async def hold(self) -> None:
        """Stand still until everybody who said so has let go; a replica out of service does so when it is back."""
        self.holds += 1
        if self.holds == 1 and self.health is Health.UP:
            await self.engine.pause()

    async def let_go(self) -> None:
        """One holder less."""
        self.holds -= 1
        if self.holds == 0 and self.health is Health.UP:
            await self.engine.resume()

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def load(self) -> int:
        return len(self.inflight)

    @property
    def version(self) -> int:
        return self.engine.receiver.version


class LoadIndex:
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


class WaitingLine:
    """Requests without a slot, in order; entries whose future is done (cancelled) are skipped."""

    def __init__(self) -> None:
        self._heap: list[Queued] = []

    def push(self, queued: Queued) -> None:
        heappush(self._heap, queued)

    def pop(self) -> Queued | None:
        """The first one still waiting."""
        while self._heap:
            queued = heappop(self._heap)
            if not queued.slot.done():
                return queued
        return None

    def __len__(self) -> int:
        return sum(not queued.slot.done() for queued in self._heap)
