"""A reward model in processes of its own: its queue, its deadline, and what happens when a process ends.

Guarantees: a request has one answer, or a `RewardError`. A process that ends is noticed at once and restarted, with
growing pauses; the requests that it had are asked again, of another process of the same model or of the next one. A
request that ends several processes has no answer; those that were beside it have. A process that does not answer in
time is restarted. Waiting for a turn or for a process counts as no time of the reward.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from headway.deadlines import pause_deadline
from headway.errors import RewardError
from headway.processes.base import ChildSpec, RestartablePeer, StartPeer

_ATTEMPTS = 3
"""Processes that one request may lose before it is blamed."""
_MOST_RESTARTS = 5
"""Failed restarts in a row after which waiting requests fail."""
_LONGEST_PAUSE_S = 30.0


class RewardModelLost(RewardError):
    """A process of a reward model ended, with everything it worked on."""

    fatal = True


@dataclass(eq=False, slots=True)
class _Replica:
    """One process of the model."""

    peer: RestartablePeer
    requests: int = 0
    failures: int = 0
    """Restarts that have failed since it was last up."""
    reviving: asyncio.Task[None] | None = None


@dataclass(kw_only=True, eq=False)
class RewardModelClient:
    """Asks the processes that `specs` describe, at most `width` requests at a time."""

    specs: Sequence[ChildSpec]
    start_child: StartPeer
    width: int
    timeout_s: float
    """Seconds for one answer, once a process works on it."""
    backoff_s: float = 1.0
    report: Callable[[str, str], None] = lambda name, reason: None
    """Is called when a process goes down, with its name and the reason, and with an empty reason when it is back."""
    _replicas: list[_Replica] = field(init=False, default_factory=list)
    _closed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._slots, self._changed = asyncio.Semaphore(self.width), asyncio.Event()
        self._suspects = asyncio.Lock()
        """Held by one request on its last attempt, so that no other one that ends processes is beside it."""
        for spec in self.specs:
            self._replicas.append(self._make_replica(spec))

    def _make_replica(self, spec: ChildSpec) -> _Replica:
        peer = RestartablePeer(
            spec,
            self.start_child,
            crashed=RewardModelLost,
            on_note=lambda note: None,
            on_down=lambda: self._on_down(replica),
        )
        replica = _Replica(peer)
        return replica

    async def start(self) -> None:
        """Start all processes. Raises `ConfigError` if one cannot run as configured, else `RewardModelLost`."""
        starts = [self._start_twice(replica) for replica in self._replicas]
        for outcome in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _start_twice(self, replica: _Replica) -> None:
        """Start a process; start it once more if it was lost while it started."""
        replica.reviving = asyncio.current_task()
        try:
            await replica.peer.start()
        except RewardModelLost:
            await replica.peer.restart()
        finally:
            replica.reviving = None

    async def close(self) -> None:
        """End all processes. Idempotent."""
        self._closed = True
        for replica in self._replicas:
            if replica.reviving is not None:
                replica.reviving.cancel()
        await asyncio.gather(*(replica.peer.close() for replica in self._replicas))

    async def ask(self, method: str, *args: Any) -> Any:
        """Return the answer of the model. Raises `RewardError`."""
        with pause_deadline():
            async with self._slots:
                for attempt in range(1, _ATTEMPTS + 1):
                    try:
                        async with self._suspects if attempt == _ATTEMPTS else nullcontext():
                            return await self._ask_replica(await self._select_replica(), method, args)
                    except RewardModelLost as error:
                        problem = error
        raise RewardError(f"{_ATTEMPTS} processes ended while they worked on it: {problem}") from problem

    async def _ask_replica(self, replica: _Replica, method: str, args: tuple[Any, ...]) -> Any:
        replica.requests += 1
        try:
            async with asyncio.timeout(self.timeout_s):
                return await replica.peer.call(method, *args, failure=RewardError)
        except TimeoutError:
            self._revive(replica, f"no answer after {self.timeout_s:g} s")
            raise RewardError(f"{replica.peer.name}: no answer after {self.timeout_s:g} s") from None
        finally:
            replica.requests -= 1

    async def _select_replica(self) -> _Replica:
        """Return the least busy process that is up, once there is one. Raises `RewardError` if none comes up."""
        while True:
            up = [replica for replica in self._replicas if replica.peer.alive and replica.reviving is None]
            if up:
                return min(up, key=lambda replica: replica.requests)
            first = self._replicas[0]
            if self._closed or all(replica.failures >= _MOST_RESTARTS for replica in self._replicas):
                raise RewardError(f"{first.peer.name} is {'closed' if self._closed else 'down'}")
            self._changed.clear()
            await self._changed.wait()

    def _on_down(self, replica: _Replica) -> None:
        self._revive(replica, replica.peer.down_reason)

    def _revive(self, replica: _Replica, reason: str) -> None:
        """Restart a process, unless that is being done."""
        if not self._closed and replica.reviving is None:
            self.report(replica.peer.name, reason)
            replica.reviving = asyncio.create_task(self._restart(replica), name=f"{replica.peer.name}/revive")

    async def _restart(self, replica: _Replica) -> None:
        pause_s = self.backoff_s
        try:
            while True:
                try:
                    await replica.peer.restart()
                    break
                except RewardModelLost:
                    replica.failures += 1
                    self._changed.set()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            replica.failures = 0
            self.report(replica.peer.name, "")
        finally:
            replica.reviving = None
            self._changed.set()
