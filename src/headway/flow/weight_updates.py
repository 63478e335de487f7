"""Updates the weights of replicas: gather a version once, send and load it everywhere, flip each replica.

Guarantees: a replica flips only when the whole manifest has arrived and is verified. A bucket that fails is sent again
a bounded number of times. A replica that cannot be updated is reported and does not delay the others.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import TypeVar

from headway.errors import BackendError, TransferError
from headway.monitor.event_log import EventLog
from headway.monitor.events import ErrorReport, OperationRetry, SpanBegin, SpanEnd
from headway.monitor.wait_graph import RegisteredWait, WaitGraph
from headway.rollout.concurrency import OrderedTaskGroup
from headway.rollout.replica import Replica
from headway.settings import RunSettings
from headway.trainers.base import Trainer
from headway.weights.base import Bucket, Manifest, WeightTransport

T = TypeVar("T", Manifest, Bucket)

Feed = asyncio.Queue[Manifest | Bucket | BackendError | None]
"""What one replica loads, in order: the manifest, the buckets, and `None` or an error at the end."""


class GatherFailed(TransferError):
    """The trainer could not provide the version; the replicas are not at fault."""


class WeightUpdater:
    """Pushes versions. Calls `on_flip` for each replica that serves a new one, `on_failure` for each that cannot."""

    def __init__(
        self,
        trainer: Trainer,
        transport: WeightTransport,
        settings: RunSettings,
        *,
        events: EventLog,
        waits: WaitGraph,
        on_flip: Callable[[Replica], None],
        on_failure: Callable[[Replica, BaseException], None],
    ) -> None:
        self._trainer, self._transport, self._settings = trainer, transport, settings
        self._events, self._waits, self._on_flip, self._on_failure = events, waits, on_flip, on_failure
        self._gathering = asyncio.Lock()
        self._spans = count()
        self.turn = asyncio.Lock()
        """Held while a version is pushed, and while a validation needs the versions of the replicas to stay."""
        self.checksums: dict[int, str] = {}
        """Checksum of each version that an engine has served, where engines compute them."""
        self.newest = -1
        """Version of the last push that began."""

    async def push(self, version: int, replicas: Sequence[Replica]) -> None:
        """Bring `replicas` to `version`. Raise `TransferError` only if the trainer cannot provide it.

        A replica that misses its deadline counts as failed, so that it does not delay the next version.
        """
        self.newest = version
        behind = [replica for replica in replicas if not (replica.in_service and replica.version >= version)]
        await self._distribute(version, behind, self._on_failure)

    async def seed(self, replica: Replica) -> None:
        """Bring one restarted replica to the newest version. Raise what went wrong."""
        failures: list[BaseException] = []
        await self._distribute(self._trainer.version, [replica], lambda _, error: failures.append(error))
        if failures:
            raise failures[0]

    async def _distribute(
        self, version: int, replicas: Sequence[Replica], on_failure: Callable[[Replica, BaseException], None]
    ) -> None:
        """Gather from the trainer and load into the replicas at the same time."""
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

    # -- gather, send, load

    async def _gather(self, version: int, feeds: Sequence[Feed]) -> None:
        """Read manifest and buckets from the trainer, one version at a time, and queue them for every replica."""
        limit = self._settings.reliability.transfer_timeout_s
        last: BackendError | None = GatherFailed(f"version {version}: gather was given up")
        try:
            async with self._gathering, asyncio.timeout(limit):
                span = self._begin_span("gather", version)
                try:
                    with self._waiting(f"gather of version {version}", "trainer"):
                        manifest, buckets = await self._trainer.source.gather(version)
                        for feed in feeds:
                            feed.put_nowait(manifest)
                        async for bucket in buckets:
                            for feed in feeds:
                                feed.put_nowait(bucket)
                finally:
                    self._end_span("gather", span)
            last = None
        except TimeoutError:
            raise TransferError(f"version {version}: gather not done after {limit} s") from None
        finally:
            for feed in feeds:
                feed.put_nowait(last)

    async def _update(self, replica: Replica, feed: Feed, on_failure: Callable[[Replica, BaseException], None]) -> None:
        """Update one replica inside its deadline. An outcome that arrives after the replica has failed is ignored."""
        incarnation, limit = replica.incarnation, self._settings.reliability.transfer_timeout_s
        try:
            await _await_until(self._load(replica, feed), limit, f"the update of {replica.name}")
        except GatherFailed:
            return  # not the fault of the replica; `_gather` raises it
        except BackendError as error:
            if replica.incarnation == incarnation:
                on_failure(replica, error)
        else:
            if replica.incarnation == incarnation:
                self._on_flip(replica)

    async def _load(self, replica: Replica, feed: Feed) -> None:
        """Load every bucket into one replica, then flip it."""
        incarnation, manifest = replica.incarnation, await _next_item(feed, Manifest)
        assert manifest is not None
        receiver = replica.engine.receiver
        span = self._begin_span(f"load {replica.name}", manifest.version)
        try:
            if not self._settings.enable_dual_buffer:
                replica.pause_count += 1
                with self._waiting(f"pause before version {manifest.version}", replica.name):
                    await replica.apply_pause()
            with self._waiting(f"begin of version {manifest.version}", replica.name):
                await receiver.begin(manifest)
            while (bucket := await _next_item(feed, Bucket)) is not None:
                what = f"bucket {bucket.index + 1} of {len(manifest.checksums)} of version {manifest.version}"
                await self._send_bucket(bucket, what, replica, incarnation)
            with self._waiting(f"flip to version {manifest.version}", replica.name):
                await receiver.flip()
        finally:
            self._end_span(f"load {replica.name}", span)
            if not self._settings.enable_dual_buffer:
                replica.pause_count -= 1
                limit = self._settings.reliability.abort_timeout_s
                await _await_until(replica.apply_pause(), limit, f"resume of {replica.name}")

    async def _send_bucket(self, bucket: Bucket, what: str, replica: Replica, incarnation: int) -> None:
        """Send and load one bucket; retry while it is lost, late or damaged and the replica has not failed."""
        receiver = replica.engine.receiver
        reliability = self._settings.reliability
        limit = reliability.transfer_timeout_s / (reliability.transfer_retries + 1)

        async def once() -> None:
            with self._waiting(f"send of {what} to {replica.name}", "transport"):
                sent = await self._transport.send(bucket, receiver)
            with self._waiting(f"load of {what}", replica.name):
                await receiver.load(sent)

        for attempt in range(reliability.transfer_retries + 1):
            try:
                await _await_until(once(), limit, f"bucket {bucket.index} to {replica.name}")
                return
            except TransferError as error:
                if replica.incarnation != incarnation:
                    raise
                self._events.emit(ErrorReport.from_exception(replica.name, error))
                if attempt == reliability.transfer_retries:
                    raise
                self._events.emit(OperationRetry(who="param_update", attempt=attempt + 1))
            await asyncio.sleep(reliability.restart_backoff_s * float(2**attempt))

    def _waiting(self, what: str, on: str) -> RegisteredWait:
        return self._waits.waiting("param_update", what, on)

    def _begin_span(self, name: str, version: int) -> int:
        span = next(self._spans)
        self._events.emit(SpanBegin(who="param_update", span=span, name=f"{name} v{version}"))
        return span

    def _end_span(self, name: str, span: int) -> None:
        self._events.emit(SpanEnd(who="param_update", span=span, name=name))


async def _await_until(call: Awaitable[None], limit_s: float, what: str) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await call
    except TimeoutError:
        raise TransferError(f"{what}: not there after {limit_s} s") from None


async def _next_item(feed: Feed, kind: type[T]) -> T | None:
    """Return the next item of a feed, `None` at its end. Raise the error that ended it early."""
    item = await feed.get()
    if isinstance(item, BackendError):
        raise item
    assert item is None or isinstance(item, kind)
    return item
