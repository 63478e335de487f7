"""A version on its way into vLLM: buckets are gathered in a segment of shared memory that its workers can open.

A bucket is verified in the segment itself, after it was copied there: what the workers read is what was verified. A
version is looked at (`check`) before any of it is taken in. The segment lives from `begin` to the end of the flip.
Implements `WeightReceiver`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from headway.errors import TransferError
from headway.weights.base import Bucket, Manifest, StagedReceiver, compute_checksum

SwitchToBuffer = Callable[[Manifest, str], Awaitable[None]]
"""Serve the version whose bytes lie in the segment of this name."""


class SharedBuffer(Protocol):
    """Memory that other processes can open by its name."""

    name: str

    @property
    def buffer(self) -> memoryview:
        """All of it."""
        ...

    def close(self) -> None:
        """Let it go. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BufferedVersion:
    """A version that arrives. Implements `Stage`."""

    manifest: Manifest
    room: SharedBuffer
    read: Callable[[Any], Any]

    def load(self, bucket: Bucket) -> None:
        """Copy, then verify."""
        data, wanted = memoryview(self.read(bucket.payload)).cast("B"), self.manifest.checksums[bucket.index]
        here = self.room.buffer[self._place(bucket.index, data.nbytes)]
        here[:] = data
        found = compute_checksum(here)
        if found != wanted:
            raise TransferError(f"bucket {bucket.index} of version {bucket.version}: {found} instead of {wanted}")

    def _place(self, index: int, size: int) -> slice:
        """A whole number of equal buckets from the start, or the last."""
        total, last = self.manifest.total_bytes, len(self.manifest.checksums) - 1
        start = total - size if index == last else index * size
        if start < 0 or start + size > total:
            raise TransferError(f"bucket {index} of version {self.manifest.version}: no place for {size} bytes")
        return slice(start, start + size)


class SharedBufferReceiver(StagedReceiver[BufferedVersion]):
    """`room` makes a segment of so many bytes, `read` opens payloads, `check` raises `TransferError`."""

    def __init__(
        self,
        switch: SwitchToBuffer,
        *,
        room: Callable[[int], SharedBuffer],
        check: Callable[[Manifest], None] = lambda manifest: None,
        read: Callable[[Any], Any] = memoryview,
    ) -> None:
        super().__init__()
        self._switch, self._room, self._check, self._read = switch, room, check, read
        self._held: SharedBuffer | None = None

    async def _staged(self, manifest: Manifest) -> BufferedVersion:
        self._check(manifest)
        self._let_go()
        self._held = room = self._room(manifest.total_bytes)
        return BufferedVersion(manifest=manifest, room=room, read=self._read)

    async def _serve(self, stage: BufferedVersion) -> None:
        await self._switch(stage.manifest, stage.room.name)

    async def _settle(self) -> None:
        self._let_go()

    def reset(self, *, gone: bool) -> None:
        super().reset(gone=gone)
        self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()
