"""The spare buffer: one version of the weights on its way in.

Every bucket is verified against the manifest before a byte of it is used; a tensor is converted and laid out for
serving as soon as its last element is here, so that a flip has nothing left to do.

Guarantees: `values` gives a whole, verified version or raises. Buckets of this version may come in any order and twice;
those that come early are held until the ones before them are here. Not safe for two threads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from headway.engines.native.served_parameters import ServedParameters, ServedValues
from headway.errors import TransferError
from headway.weights.base import Bucket, DevicePayload, Manifest, StagedReceiver, TensorEntry, compute_checksum

OpenPayload = Callable[[Any], Any]
"""From a bucket's payload to a buffer with its bytes, or a `DevicePayload`: attaches shared memory, for instance."""


class StagedVersion:
    """Made by `begin`, thrown away by the next one."""

    def __init__(self, manifest: Manifest, parameters: ServedParameters, read: OpenPayload) -> None:
        _check(manifest, parameters)
        self._read = read
        self.manifest = manifest
        self.served_in_place = parameters.served_in_place
        self._parameters = parameters
        self._loaded: set[int] = set()
        self._early: dict[int, Tensor] = {}
        self._next = 0
        """The bucket that comes next in the stream of bytes."""
        self._entry = 0
        self._done = 0
        """Elements of that entry that are here."""
        self._room: Tensor | None = None
        self._seen: set[str] = set()
        self._parts: dict[str, Tensor] = {}
        self._values: dict[str, tuple[Tensor, ...]] = {}

    def load(self, bucket: Bucket) -> None:
        """Verify one bucket and take in what is next in line."""
        data, found = self._taken(bucket.payload)
        wanted = self.manifest.checksums[bucket.index]
        if found != wanted:
            where = f"bucket {bucket.index} of version {bucket.version}"
            raise TransferError(f"{where}: checksum {found} instead of {wanted}")
        if bucket.index in self._loaded:
            return
        self._loaded.add(bucket.index)
        self._early[bucket.index] = data
        while self._next in self._early:
            self._take(self._early.pop(self._next))
            self._next += 1

    def values(self) -> ServedValues:
        """The whole version, once every bucket was loaded."""
        if self._entry != len(self.manifest.tensors):
            lacking = self.manifest.tensors[self._entry].name
            raise TransferError(f"version {self.manifest.version}: the buckets end before {lacking} does")
        return self._values

    def _taken(self, payload: Any) -> tuple[Tensor, str]:
        """The bytes and their checksum. Of those on the host a copy: nobody changes it before its use."""
        opened = payload if isinstance(payload, DevicePayload) else self._read(payload)
        if isinstance(opened, DevicePayload):
            return opened.data, opened.checksum()
        data = bytearray(memoryview(opened).cast("B"))
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0), compute_checksum(data)

    def _take(self, data: Tensor) -> None:
        """The next bytes of the stream."""
        while len(data):
            if self._entry == len(self.manifest.tensors):
                raise TransferError(f"version {self.manifest.version}: {len(data)} bytes more than the manifest says")
            entry = self.manifest.tensors[self._entry]
            dtype, size = _dtype(entry), prod(entry.shape)
            count = min(len(data) // dtype.itemsize, size - self._done)
            if count == 0 and size:
                raise TransferError(f"{entry.name}: a bucket ends inside an element of {entry.dtype}")
            piece, data = data[: count * dtype.itemsize], data[count * dtype.itemsize :]
            self._fill(entry, piece if piece.data_ptr() % dtype.itemsize == 0 else piece.clone(), dtype, count)
            if self._done == size:
                self._finish(entry)

    def _fill(self, entry: TensorEntry, piece: Tensor, dtype: torch.dtype, count: int) -> None:
        if self._room is None:
            self._room = self._parameters.empty(entry.name)
        if piece.storage_offset() % dtype.itemsize:
            piece = piece.clone()
        self._room.view(-1)[self._done : self._done + count] = piece.view(dtype)
        self._done += count

    def _finish(self, entry: TensorEntry) -> None:
        name, room = self._parameters.canonical(entry.name), self._room
        if name is not None and room is not None and name not in self._seen:  # else tied: the same tensor again
            self._seen.add(name)
            self._parameters.collect(name, room, self._parts, self._values)
        self._entry, self._done, self._room = self._entry + 1, 0, None


def _dtype(entry: TensorEntry) -> torch.dtype:
    dtype = getattr(torch, entry.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise TransferError(f"{entry.name}: unknown dtype {entry.dtype!r}")
    return dtype


def _check(manifest: Manifest, parameters: ServedParameters) -> None:
    """Refuse what could never be served, before a byte is moved."""
    here = set()
    for entry in manifest.tensors:
        name = parameters.canonical(entry.name)
        if name is None:
            raise TransferError(f"version {manifest.version}: the model has no tensor {entry.name!r}")
        if tuple(entry.shape) != parameters.shape(entry.name):
            raise TransferError(f"{entry.name}: shape {entry.shape} instead of {parameters.shape(entry.name)}")
        _dtype(entry)
        here.add(name)
    if missing := parameters.names - here:
        raise TransferError(f"version {manifest.version} lacks {len(missing)} tensors, {min(missing)!r} among them")
    total = sum(prod(entry.shape) * _dtype(entry).itemsize for entry in manifest.tensors)
    if total != manifest.total_bytes:
        raise TransferError(
            f"version {manifest.version}: {manifest.total_bytes} bytes announced, its tensors have {total}"
        )


class NativeReceiver(StagedReceiver[StagedVersion]):
    """`parameters` is asked for when a version begins; `switch` serves it between two tokens."""

    def __init__(
        self,
        parameters: Callable[[], Awaitable[ServedParameters]],
        switch: Callable[[ServedValues, int], Awaitable[None]],
        *,
        threads: int = 1,
        read: OpenPayload = memoryview,
    ) -> None:
        super().__init__(lambda: torch.set_num_threads(threads))
        self._parameters = parameters
        self._switch = switch
        self._read = read
        self._served: ServedValues = {}
        """Held so that this decides which thread frees them."""
        self._spent: list[ServedValues] = []

    async def _staged(self, manifest: Manifest) -> StagedVersion:
        return StagedVersion(manifest, await self._parameters(), self._read)

    async def _serve(self, stage: StagedVersion) -> None:
        values = stage.values()
        await self._switch(values, stage.manifest.version)
        self._spent, self._served = [self._served], values if stage.served_in_place else {}

    async def _settle(self) -> None:
        if self._loader is not None:  # allocators give back what its own thread frees, and keep what another one does
            await self._off_the_loop(self._spent.clear)

    def reset(self, *, gone: bool) -> None:
        super().reset(gone=gone)
        self._served, self._spent = {}, []
