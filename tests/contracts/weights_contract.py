"""What a weight source, a transport and a receiver must do together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from headway.errors import TransferError
from headway.weights.base import Bucket, Manifest, WeightReceiver, WeightSource, WeightTransport


class WeightsContract(ABC):
    """Subclass with a source that holds versions 1 and 2."""

    @abstractmethod
    def run(self, scenario: Coroutine[Any, Any, None]) -> None: ...

    @abstractmethod
    def make(self) -> tuple[WeightSource, WeightTransport, WeightReceiver]:
        """A source holding versions 1 and 2 (the newest), a transport, and a receiver of an engine without weights."""

    @abstractmethod
    def corrupted(self, bucket: Bucket) -> Bucket:
        """`bucket` with something else inside."""

    def another(self) -> WeightReceiver:
        """The receiver of a second engine without weights, beside what `make` made last; one that `make` would make,
        where receivers know nothing of who sends."""
        return self.make()[2]

    async def updated(
        self, source: WeightSource, transport: WeightTransport, receiver: WeightReceiver, version: int
    ) -> None:
        manifest, buckets = await source.gather(version)
        await receiver.begin(manifest)
        async for bucket in buckets:
            await receiver.load(await transport.send(bucket, receiver))
        await receiver.flip()

    async def carried(
        self, source: WeightSource, transport: WeightTransport, receiver: WeightReceiver, version: int
    ) -> tuple[Manifest, list[Bucket]]:
        manifest, buckets = await source.gather(version)
        return manifest, [await transport.send(bucket, receiver) async for bucket in buckets]

    def test_a_whole_version_is_served_after_the_flip_and_not_before(self) -> None:
        async def scenario() -> None:
            source, transport, receiver = self.make()
            assert receiver.version == -1
            manifest, buckets = await self.carried(source, transport, receiver, 2)
            assert manifest.version == 2 and len(buckets) == len(manifest.checksums)
            assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
            await receiver.begin(manifest)
            for bucket in buckets:
                await receiver.load(bucket)
            assert receiver.version == -1
            await receiver.flip()
            assert receiver.version == 2

        self.run(scenario())

    def test_torn_weights_cannot_be_flipped(self) -> None:
        async def scenario() -> None:
            source, transport, receiver = self.make()
            manifest, buckets = await self.carried(source, transport, receiver, 2)
            await receiver.begin(manifest)
            for bucket in buckets[:-1]:
                await receiver.load(bucket)
            with pytest.raises(TransferError):
                await receiver.flip()
            assert receiver.version == -1
            await receiver.load(buckets[-1])
            await receiver.flip()
            assert receiver.version == 2

        self.run(scenario())

    def test_a_corrupted_bucket_is_refused(self) -> None:
        async def scenario() -> None:
            source, transport, receiver = self.make()
            manifest, buckets = await self.carried(source, transport, receiver, 2)
            await receiver.begin(manifest)
            for bucket in buckets[1:]:
                await receiver.load(bucket)
            with pytest.raises(TransferError):
                await receiver.load(self.corrupted(buckets[0]))
            with pytest.raises(TransferError):
                await receiver.flip()

        self.run(scenario())

    def test_beginning_again_throws_the_unfinished_version_away(self) -> None:
        async def scenario() -> None:
            source, transport, receiver = self.make()
            old, old_buckets = await self.carried(source, transport, receiver, 1)
            new, new_buckets = await self.carried(source, transport, receiver, 2)
            await receiver.begin(old)
            for bucket in old_buckets:
                await receiver.load(bucket)
            await receiver.begin(new)
            with pytest.raises(TransferError):
                await receiver.load(old_buckets[0])
            with pytest.raises(TransferError):
                await receiver.flip()
            for bucket in new_buckets:
                await receiver.load(bucket)
            await receiver.flip()
            assert receiver.version == 2

        self.run(scenario())

    def test_a_bucket_of_no_begun_version_is_refused(self) -> None:
        async def scenario() -> None:
            source, transport, receiver = self.make()
            _, buckets = await self.carried(source, transport, receiver, 2)
            with pytest.raises(TransferError):
                await receiver.load(buckets[0])
            with pytest.raises(TransferError):
                await receiver.flip()

        self.run(scenario())

    def test_buckets_may_arrive_in_any_order_and_twice(self) -> None:
        async def scenario() -> None:
            source, transport, receiver = self.make()
            manifest, buckets = await self.carried(source, transport, receiver, 2)
            await receiver.begin(manifest)
            for bucket in [*reversed(buckets), *buckets]:
                await receiver.load(replace(bucket))
            await receiver.flip()
            assert receiver.version == 2

        self.run(scenario())

    def test_a_late_joiner_is_given_the_newest_version_and_nobody_else_is_asked(self) -> None:
        async def scenario() -> None:
            source, transport, receiver = self.make()
            for version in (1, 2):
                await self.updated(source, transport, receiver, version)
            late = self.another()
            assert late.version == -1
            await self.updated(source, transport, late, 2)
            assert (receiver.version, late.version) == (2, 2)

        self.run(scenario())

    def test_a_version_that_is_not_held_is_refused(self) -> None:
        async def scenario() -> None:
            source, _, _ = self.make()
            with pytest.raises(TransferError):
                await source.gather(99)

        self.run(scenario())
