"""Carrying a version of the weights into the replicas: gather once, send and load everywhere, flip each.

Guarantees: a replica flips only when the whole manifest has arrived and verified; a bucket that fails is sent
again within its budget; a replica that cannot be updated is reported and the others are not held up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import TypeVar

from headway.errors import BackendError, TransferError
from headway.monitor.event_log import EventLog
from headway.monitor.events import ErrorReport, OperationRetry, SpanBegin, SpanEnd
from headway.rollout.concurrency import OrderedTaskGroup
from headway.rollout.replica import Replica
from headway.settings import RunSettings
from headway.trainers.base import Trainer
from headway.weights.base import Bucket, Manifest, WeightTransport

T = TypeVar("T", Manifest, Bucket)

Feed = asyncio.Queue[Manifest | Bucket | BackendError | None]
"""What one replica is to load, in order: the manifest, the buckets, the end (or why there is none)."""


class GatherFailed(TransferError):
    """The version could not be had from the trainer: no replica is to blame."""


class WeightUpdater:
    """Pushes versions; `on_flip` is told of each replica that serves a new one, `on_failure` of each that cannot."""

    def __init__(
        self,
        trainer: Trainer,
        transport: WeightTransport,
        settings: RunSettings,
        *,
        events: EventLog,
        on_flip: Callable[[Replica], None],
        on_failure: Callable[[Replica, BaseException], None],
    ) -> None:
        self._trainer, self._transport, self._settings = trainer, transport, settings
        self._events, self._on_flip, self._on_failure = events, on_flip, on_failure
        self._gathering = asyncio.Lock()
        self._spans = count()
        self.newest = -1
        """The last version that a push began with."""

    async def push(self, version: int, replicas: Sequence[Replica]) -> None:
        """Bring `replicas` to `version`. Raises `TransferError` only if the trainer cannot give it.

        A replica that takes longer than its deadline is given up, so that it holds up the next version no longer.
        """
        self.newest = version
        behind = [replica for replica in replicas if not (replica.in_service and replica.version >= version)]
        await self._distribute(version, behind, self._on_failure)

    async def seed(self, replica: Replica) -> None:
        """Bring one restarted replica to the newest version. Raises what went wrong."""
        failures: list[BaseException] = []
        await self._distribute(self._trainer.version, [replica], lambda _, error: failures.append(error))
        if failures:
            raise failures[0]

    async def _distribute(
        self, version: int, replicas: Sequence[Replica], on_failure: Callable[[Replica, BaseException], None]
    ) -> None:
        """Gather here, load there, at the same time."""
        feeds = [Feed() for _ in replicas]
        failure: BackendError | None = None
        async with OrderedTaskGroup() as tasks:
            for replica, feed in zip(replicas, feeds, strict=True):
                tasks.create_task(self._update(replica, feed, on_failure), name=f"update/{replica.name}")
            try:
                await self._gather(version, feeds)
            except BackendError as error:
                failure = error
        if failure is not None:
            raise failure

    # -- the three parts

    async def _gather(self, version: int, feeds: Sequence[Feed]) -> None:
        """On the trainer, serial: manifest and buckets to everybody as they come."""
        limit = self._settings.reliability.transfer_timeout_s
        last: BackendError | None = GatherFailed(f"version {version}: gather was given up")
        try:
            async with self._gathering, asyncio.timeout(limit):
                span = self._begin("gather", version)
                try:
                    manifest, buckets = await self._trainer.source.gather(version)
                    for feed in feeds:
                        feed.put_nowait(manifest)
                    async for bucket in buckets:
                        for feed in feeds:
                            feed.put_nowait(bucket)
                finally:
                    self._end("gather", span)
            last = None
        except TimeoutError:
            raise TransferError(f"version {version}: gather not done after {limit} s") from None
        finally:
            for feed in feeds:
                feed.put_nowait(last)

    async def _update(self, replica: Replica, feed: Feed, on_failure: Callable[[Replica, BaseException], None]) -> None:
        """One replica, inside its deadline. What happens in a life that is over is no news."""
        life, limit = replica.life, self._settings.reliability.transfer_timeout_s
        try:
            await _within(self._load(replica, feed), limit, f"the update of {replica.name}")
        except GatherFailed:
            return  # not the replica's fault; whoever pushed is told
        except BackendError as error:
            if replica.life == life:
                on_failure(replica, error)
        else:
            if replica.life == life:
                self._on_flip(replica)

    async def _load(self, replica: Replica, feed: Feed) -> None:
        """Into one replica: every bucket, then the flip."""
        life, manifest = replica.life, await _next(feed, Manifest)
        assert manifest is not None
        receiver = replica.engine.receiver
        span = self._begin(f"load {replica.name}", manifest.version)
        try:
            if not self._settings.enable_dual_buffer:
                replica.holds += 1
                await replica.settle()
            await receiver.begin(manifest)
            while (bucket := await _next(feed, Bucket)) is not None:
                await self._carry(bucket, replica, life)
            await receiver.flip()
        finally:
            self._end(f"load {replica.name}", span)
            if not self._settings.enable_dual_buffer:
                replica.holds -= 1
                limit = self._settings.reliability.abort_timeout_s
                await _within(replica.settle(), limit, f"going on of {replica.name}")

    async def _carry(self, bucket: Bucket, replica: Replica, life: int) -> None:
        """One bucket, sent and loaded; again when it was lost, late or damaged, and the replica is still there."""
        receiver = replica.engine.receiver
        reliability = self._settings.reliability
        limit = reliability.transfer_timeout_s / (reliability.transfer_retries + 1)

        async def once() -> None:
            await receiver.load(await self._transport.send(bucket, receiver))

        for attempt in range(reliability.transfer_retries + 1):
            try:
                await _within(once(), limit, f"bucket {bucket.index} to {replica.name}")
                return
            except TransferError as error:
                if replica.life != life:
                    raise
                self._events.emit(ErrorReport.from_exception(replica.name, error))
                if attempt == reliability.transfer_retries:
                    raise
                self._events.emit(OperationRetry(who="param_update", attempt=attempt + 1))
            await asyncio.sleep(reliability.restart_backoff_s * float(2**attempt))

    def _begin(self, name: str, version: int) -> int:
        span = next(self._spans)
        self._events.emit(SpanBegin(who="param_update", span=span, name=f"{name} v{version}"))
        return span

    def _end(self, name: str, span: int) -> None:
        self._events.emit(SpanEnd(who="param_update", span=span, name=name))


async def _within(call: Awaitable[None], limit_s: float, what: str) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await call
    except TimeoutError:
        raise TransferError(f"{what}: not there after {limit_s} s") from None


async def _next(feed: Feed, kind: type[T]) -> T | None:
    """The next part of a version; raises when there will be none."""
    item = await feed.get()
    if isinstance(item, BackendError):
        raise item
    assert item is None or isinstance(item, kind)
    return item
