"""The engine's side of a weight update: a version arrives beside the weights that are served; a flip exchanges them.

Every bucket is verified against the manifest before a byte of it is used. A tensor is converted and laid out for
serving as soon as its last element has arrived, so that a flip has nothing left to do.

Guarantees: `take_values` returns a whole, verified version or raises. Buckets of a version may come in any order and
twice; those that come early are held until the ones before them have arrived.
"""

from collections.abc import Awaitable, Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from headway.engines.native.served_parameters import ServedParameters, ServedValues
from headway.errors import TransferError
from headway.weights.base import (
    Bucket,
    DevicePayload,
    Manifest,
    OpenPayload,
    StagedReceiver,
    TensorEntry,
    compute_checksum,
)
from headway.weights.device_memory import compute_tensor_checksum
from headway.weights.weight_layout import DTYPES, compute_manifest_layout


class StagedVersion:
    """A version that arrives. Used by one thread at a time."""

    def __init__(
        self,
        manifest: Manifest,
        parameters: ServedParameters,
        open_payload: OpenPayload,
        *,
        checks: bool = False,
        replaces: bool = False,
    ) -> None:
        _check_manifest(manifest, parameters)
        self._replaces = replaces
        self._open_payload = open_payload
        self._sums: list[str] | None = [] if checks else None
        """Checksums of the tensors as they are in the memory of this engine; `None`: none are computed."""
        self.manifest = manifest
        self.served_in_place = parameters.served_in_place
        self._parameters = parameters
        self._loaded: set[int] = set()
        self._early: dict[int, Tensor] = {}
        self._next = 0
        """The bucket that is next in the stream of bytes."""
        self._entry = 0
        self._arrived = 0
        """Elements of that entry that have arrived."""
        self._tensor: Tensor | None = None
        self._seen: set[str] = set()
        self._parts: dict[str, Tensor] = {}
        self._values: dict[str, tuple[Tensor, ...]] = {}

    def load(self, bucket: Bucket) -> None:
        """Verify one bucket and take in the bytes that are next. Raises `TransferError`."""
        data, found = self._copy_payload(bucket.payload)
        self.manifest.verify(bucket, found)
        if bucket.index in self._loaded:
            return
        self._loaded.add(bucket.index)
        self._early[bucket.index] = data
        while self._next in self._early:
            self._take_bytes(self._early.pop(self._next))
            self._next += 1

    def take_values(self) -> ServedValues:
        """Return the whole version, once every bucket was loaded."""
        if self._entry != len(self.manifest.tensors):
            lacking = self.manifest.tensors[self._entry].name
            raise TransferError(f"version {self.manifest.version}: the buckets end before {lacking} does")
        return self._values

    @property
    def checksum(self) -> str:
        """Checksum of all tensors in the type that the engine computes with; empty if none was asked for."""
        return "" if self._sums is None else compute_checksum("".join(self._sums).encode())

    def _copy_payload(self, payload: Any) -> tuple[Tensor, str]:
        """Return the bytes and their checksum. Bytes on the host are copied, so that they cannot change."""
        opened = payload if isinstance(payload, DevicePayload) else self._open_payload(payload)
        if isinstance(opened, DevicePayload):
            return opened.data, opened.checksum()
        data = bytearray(memoryview(opened).cast("B"))
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0), compute_checksum(data)

    def _take_bytes(self, data: Tensor) -> None:
        """Take in the next bytes of the stream."""
        while len(data):
            if self._entry == len(self.manifest.tensors):
                raise TransferError(f"version {self.manifest.version}: {len(data)} bytes more than the manifest says")
            entry = self.manifest.tensors[self._entry]
            dtype, size = DTYPES[entry.dtype], prod(entry.shape)
            count = min(len(data) // dtype.itemsize, size - self._arrived)
            if count == 0 and size:
                raise TransferError(f"{entry.name}: a bucket ends inside an element of {entry.dtype}")
            piece, data = data[: count * dtype.itemsize], data[count * dtype.itemsize :]
            self._copy_elements(entry, piece if piece.data_ptr() % dtype.itemsize == 0 else piece.clone(), dtype, count)
            if self._arrived == size:
                self._finish_tensor(entry)

    def _copy_elements(self, entry: TensorEntry, piece: Tensor, dtype: torch.dtype, count: int) -> None:
        if self._tensor is None:
            self._tensor = self._parameters.empty(entry.name)
        if piece.storage_offset() % dtype.itemsize:
            piece = piece.clone()
        self._tensor.view(-1)[self._arrived : self._arrived + count] = piece.view(dtype)
        self._arrived += count

    def _finish_tensor(self, entry: TensorEntry) -> None:
        name, tensor = self._parameters.canonical(entry.name), self._tensor
        if name is not None and tensor is not None and name not in self._seen:  # else tied: the same tensor again
            self._seen.add(name)
            if self._sums is not None:
                self._sums.append(compute_tensor_checksum(tensor.view(-1).view(torch.uint8)))
            unit = self._parameters.collect(name, tensor, self._parts, self._values)
            if unit is not None and self._replaces:
                self._values[unit] = self._parameters.replace(unit, self._values[unit])
        self._entry, self._arrived, self._tensor = self._entry + 1, 0, None


def _check_manifest(manifest: Manifest, parameters: ServedParameters) -> None:
    """Raise `TransferError` for a version that could never be served, before a byte is moved."""
    here = set()
    for entry in manifest.tensors:
        name = parameters.canonical(entry.name)
        if name is None:
            raise TransferError(f"version {manifest.version}: the model has no tensor {entry.name!r}")
        if tuple(entry.shape) != parameters.shape(entry.name):
            raise TransferError(f"{entry.name}: shape {entry.shape} instead of {parameters.shape(entry.name)}")
        here.add(name)
    if missing := parameters.names - here:
        raise TransferError(f"version {manifest.version} lacks {len(missing)} tensors, {min(missing)!r} among them")
    compute_manifest_layout(manifest)


class NativeReceiver(StagedReceiver[StagedVersion]):
    """`get_parameters` is called when a version begins; `switch` serves it between two tokens.

    With `checks`, `checksum` is that of the tensors that are served. With `hold`, which stops the engine until it
    switches, a version replaces what is served while it arrives; one that is given up leaves the engine stopped.
    """

    def __init__(
        self,
        get_parameters: Callable[[], Awaitable[ServedParameters]],
        switch: Callable[[ServedValues, int], Awaitable[None]],
        *,
        threads: int = 1,
        open_payload: OpenPayload = memoryview,
        checks: bool = False,
        hold: Callable[[], Awaitable[None]] | None = None,
        release_payloads: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(lambda: torch.set_num_threads(threads), release_payloads)
        self._hold = hold
        self._checks = checks
        self._get_parameters = get_parameters
        self._switch = switch
        self._open_payload = open_payload
        self._served: ServedValues = {}
        """The values that are served, referenced here so that the loader's thread frees them."""
        self._to_free: list[ServedValues] = []

    async def _make_stage(self, manifest: Manifest) -> StagedVersion:
        parameters = await self._get_parameters()
        replaces = self._hold is not None and self.version >= 0
        if self._hold is not None and replaces:
            await self._hold()
            self._served = {}
        return StagedVersion(manifest, parameters, self._open_payload, checks=self._checks, replaces=replaces)

    async def _serve(self, stage: StagedVersion) -> None:
        values = stage.take_values()
        await self._switch(values, stage.manifest.version)
        self.checksum = stage.checksum
        self._to_free, self._served = [self._served], values if stage.served_in_place else {}

    async def _release_previous(self) -> None:
        if self._loader is not None:  # allocators return memory that its own thread frees, and keep other memory
            await self._run_on_thread(self._to_free.clear)

    def reset(self, *, gone: bool) -> None:
        super().reset(gone=gone)
        self._served, self._to_free = {}, []
