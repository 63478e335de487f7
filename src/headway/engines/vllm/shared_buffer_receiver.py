"""A version on its way into vLLM: buckets are gathered in shared memory that vLLM's workers can open.

A bucket is verified in the shared buffer, after it was copied there: what the workers read is what was verified. A
version is checked (`check`) before any of it is taken in. The buffer lives from `begin` to the end of the update.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from headway.errors import TransferError
from headway.weights.base import Bucket, Manifest, StagedReceiver, compute_checksum

SwitchToBuffer = Callable[[Manifest, str], Awaitable[None]]
"""Serves the version whose bytes lie in the shared buffer of this name."""


class SharedBuffer(Protocol):
    """Memory that other processes can open by its name."""

    name: str

    @property
    def buffer(self) -> memoryview:
        """All bytes of it."""

    def close(self) -> None:
        """Release it. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BufferedVersion:
    """A version that arrives. Implements `IncomingVersion`."""

    manifest: Manifest
    shared: SharedBuffer
    open_payload: Callable[[Any], Any]

    def load(self, bucket: Bucket) -> None:
        """Copy a bucket to its place, then verify it. Raises `TransferError`."""
        data, expected = memoryview(self.open_payload(bucket.payload)).cast("B"), self.manifest.checksums[bucket.index]
        place = self.shared.buffer[self.manifest.locate_bucket(bucket.index, data.nbytes)]
        place[:] = data
        found = compute_checksum(place)
        if found != expected:
            raise TransferError(f"bucket {bucket.index} of version {bucket.version}: {found} instead of {expected}")


class SharedBufferReceiver(StagedReceiver[BufferedVersion]):
    """`make_buffer` makes a shared buffer of a size, `open_payload` opens payloads, `check` raises `TransferError`."""

    def __init__(
        self,
        switch: SwitchToBuffer,
        *,
        make_buffer: Callable[[int], SharedBuffer],
        check: Callable[[Manifest], None] = lambda manifest: None,
        open_payload: Callable[[Any], Any] = memoryview,
    ) -> None:
        super().__init__()
        self._switch, self._make_buffer, self._check, self._open_payload = switch, make_buffer, check, open_payload
        self._shared: SharedBuffer | None = None

    async def _make_stage(self, manifest: Manifest) -> BufferedVersion:
        self._check(manifest)
        self._release_buffer()
        self._shared = shared = self._make_buffer(manifest.total_bytes)
        return BufferedVersion(manifest=manifest, shared=shared, open_payload=self._open_payload)

    async def _serve(self, stage: BufferedVersion) -> None:
        await self._switch(stage.manifest, stage.shared.name)

    async def _release_previous(self) -> None:
        self._release_buffer()

    def reset(self, *, gone: bool) -> None:
        super().reset(gone=gone)
        self._release_buffer()

    def _release_buffer(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()
