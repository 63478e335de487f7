"""A version of the weights in one buffer that processes of others open: the workers of a vLLM or SGLang.

    receiver = SharedVersionReceiver(switch, memory=make_shareable_memory("cuda"), open_payload=reader.open)

Where the trainer has published a version in a buffer on a GPU of this machine, that buffer is handed on by its handle,
and nothing is copied here: the lease of the reader, or a reference, holds it until the next version is served. Bytes
that come in any other way (host memory, files, a broadcast) are gathered in a buffer of this process. In both cases
every bucket is verified in the memory that the workers read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.errors import TransferError
from headway.weights.base import (
    Bucket,
    DevicePayload,
    IpcCopies,
    IpcSlice,
    Manifest,
    OpenPayload,
    StagedReceiver,
    TensorEntry,
    compute_checksum,
)
from headway.weights.shared_memory import SharedSegment

if TYPE_CHECKING:
    from torch import Tensor

    from headway.weights.device_memory import ShareableMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionBuffer:
    """Where the bytes of a version lie."""

    handle: tuple[Any, ...]
    """Numbers, text and bytes by which `ShareableMemory` opens the whole buffer."""
    start: int = 0
    """First byte of the version in it."""


def view_tensors(entries: Sequence[TensorEntry], buffer: Tensor, start: int) -> dict[str, Tensor]:
    """Return the tensors of a version by name, as views into `buffer`, in which it begins at byte `start`."""
    from headway.weights.weight_layout import compute_layout, get_dtype

    found = {}
    for extent in compute_layout(entries)[0]:
        data, dtype = buffer[start + extent.start : start + extent.start + extent.size], get_dtype(extent.entry)
        aligned = data.clone() if data.storage_offset() % dtype.itemsize else data
        found[extent.entry.name] = aligned.view(dtype).view(extent.entry.shape)
    return found


SwitchToVersion = Callable[[Manifest, VersionBuffer], Awaitable[None]]
"""Serves the version that lies in the buffer."""


class SharedVersion:
    """A version that arrives. Implements `IncomingVersion`. Without `memory` bytes are gathered in that of the host."""

    def __init__(self, manifest: Manifest, memory: ShareableMemory | None, open_payload: OpenPayload) -> None:
        self.manifest = manifest
        self._memory, self._open_payload = memory, open_payload
        self._segment: SharedSegment | None = None
        self._own: Tensor | None = None
        """Buffer of this process on a device, where bytes had to be copied."""
        self._place: VersionBuffer | None = None
        self._held: dict[int, Tensor] = {}
        """Buckets that lie in a buffer of somebody else, which is kept as long as these are referred to."""

    def load(self, bucket: Bucket) -> None:
        """Verify a bucket where it lies, or copy it and verify the copy. Raises `TransferError`."""
        payload = bucket.payload
        opened = payload if isinstance(payload, DevicePayload) else self._open_payload(payload)
        if isinstance(opened, DevicePayload) and isinstance(payload, DevicePayload | IpcSlice | IpcCopies):
            self._refer(bucket, opened)
        elif self._held:
            raise TransferError(f"{bucket.describe()} lies in another buffer than the ones before it")
        elif self._memory is None:
            self._copy_to_host(bucket, opened)
        else:
            self._copy_to_device(self._memory, bucket, opened)

    def finish(self) -> VersionBuffer:
        """Return where the version lies once every bucket was loaded."""
        if self._memory is not None:
            self._memory.synchronize()
        if self._place is None and self._memory is not None:
            self._place = VersionBuffer(handle=self._memory.export(self._take_buffer(self._memory)))
        return self._place or VersionBuffer(handle=(self._take_segment().name,))

    def close(self) -> None:
        """Free a buffer of this process. Idempotent."""
        self._own = None
        self._held.clear()
        if self._segment is not None:
            self._segment.close()

    def _refer(self, bucket: Bucket, opened: DevicePayload) -> None:
        data: Tensor = opened.data
        place = self.manifest.locate_bucket(bucket.index, data.numel())
        self.manifest.verify(bucket, opened.checksum())
        handle = getattr(opened, "handle", None)
        if handle is None and self._memory is not None:  # a buffer of this process, exported once
            known = next(iter(self._held.values()), None)
            same = known is not None and known.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
            handle = self._place.handle if same and self._place is not None else self._memory.export(data)
        found = VersionBuffer(handle=handle or (), start=data.storage_offset() - place.start)
        if self._place is not None and found != self._place:
            raise TransferError(f"{bucket.describe()} lies in another buffer than the ones before it")
        self._place, self._held[bucket.index] = found, data

    def _copy_to_host(self, bucket: Bucket, opened: Any) -> None:
        data = memoryview(opened).cast("B")
        place = self._take_segment().buffer[self.manifest.locate_bucket(bucket.index, data.nbytes)]
        place[:] = data
        self.manifest.verify(bucket, compute_checksum(place))

    def _copy_to_device(self, memory: ShareableMemory, bucket: Bucket, opened: Any) -> None:
        import torch

        data = opened.data if isinstance(opened, DevicePayload) else torch.frombuffer(opened, dtype=torch.uint8)
        place = self._take_buffer(memory)[self.manifest.locate_bucket(bucket.index, data.numel())]
        place.copy_(data)
        found = opened.checksum() if isinstance(opened, DevicePayload) else compute_checksum(opened)
        self.manifest.verify(bucket, found)

    def _take_segment(self) -> SharedSegment:
        if self._segment is None:
            self._segment = SharedSegment.create(self.manifest.total_bytes)
        return self._segment

    def _take_buffer(self, memory: ShareableMemory) -> Tensor:
        if self._own is None:
            self._own = memory.empty(max(self.manifest.total_bytes, 1))
        return self._own


class SharedVersionReceiver(StagedReceiver[SharedVersion]):
    """`switch` makes the workers load a version; `check` raises `TransferError` for one that they could not load.

    `memory` is that of the GPU on which the workers are; none: they are on the host.
    """

    def __init__(
        self,
        switch: SwitchToVersion,
        *,
        memory: ShareableMemory | None = None,
        check: Callable[[Manifest], None] = lambda manifest: None,
        open_payload: OpenPayload = memoryview,
    ) -> None:
        super().__init__()
        self._switch, self._memory, self._check, self._open_payload = switch, memory, check, open_payload
        self._newest: SharedVersion | None = None

    async def _make_stage(self, manifest: Manifest) -> SharedVersion:
        self._check(manifest)
        self._free()
        self._newest = SharedVersion(manifest, self._memory, self._open_payload)
        return self._newest

    async def _serve(self, stage: SharedVersion) -> None:
        places: list[VersionBuffer] = []
        await self._run_on_thread(lambda: places.append(stage.finish()))
        await self._switch(stage.manifest, places[0])

    async def _release_previous(self) -> None:
        self._free()

    def reset(self, *, gone: bool) -> None:
        super().reset(gone=gone)
        self._free()

    def _free(self) -> None:
        newest, self._newest = self._newest, None
        if newest is not None:
            newest.close()
