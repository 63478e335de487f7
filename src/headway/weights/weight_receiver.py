"""The engine's side: a spare set of tensors that buckets are converted into, and the flip to it.

    receiver = SpareReceiver(engine.switch, dtype=torch.float32)

Buckets are converted straight from where they lie (heap or shared memory) into the spare tensors, on a thread of their
own; nothing is staged in between. The checksum is counted after the copy: a buffer that is overwritten while it is read
is found out. `flip` hands the spare tensors to `switch`, which makes them live between two actions; those that were
live become the spare ones of the next version, so `switch` must not return while anything still computes with them.

A bucket that did not change (`UnchangedBucket`) is copied from the live tensors, unless the spare ones hold it already: frozen
parts of a model cost nothing from the third version on.

Guarantees: `switch` sees complete, verified versions only, and `version` is what it last accepted. Any order, any
repetition of buckets. Does not know what an engine is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headway.errors import TransferError
from headway.weights.base import (
    Bucket,
    DevicePayload,
    Manifest,
    StagedReceiver,
    TensorEntry,
    UnchangedBucket,
    compute_checksum,
)
from headway.weights.shared_memory import PayloadReader
from headway.weights.weight_layout import (
    DTYPES,
    TensorExtent,
    TensorSpan,
    compute_layout,
    find_tensor_spans,
    locate_bucket,
)

ActivateTensors = Callable[[int, Mapping[str, Tensor]], Awaitable[None]]
"""Make these tensors the ones that the engine computes with, between two actions."""
OpenPayload = Callable[[Any], Any]
"""From a payload to its bytes, or to a `DevicePayload`."""


@dataclass(slots=True, eq=False)
class _Weights:
    """One set of tensors, and what is known to lie in it."""

    layout: tuple[tuple[TensorEntry, ...], int] = ((), 0)
    """Tensors and number of buckets of the versions that it can hold."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[int, str] = field(default_factory=dict)
    """By bucket: the checksum of what was last loaded and verified there."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IncomingTensors:
    """A version on its way into the spare tensors."""

    manifest: Manifest
    extents: tuple[TensorExtent, ...]
    spare: _Weights
    live: _Weights
    read: OpenPayload

    def load(self, bucket: Bucket) -> None:
        """Copy, then verify."""
        if isinstance(bucket.payload, UnchangedBucket):
            self._keep(bucket, bucket.payload.size)
            return
        opened: Any = bucket.payload if isinstance(bucket.payload, DevicePayload) else self.read(bucket.payload)
        device = isinstance(opened, DevicePayload)
        data = opened.data if device else opened
        place = locate_bucket(self.manifest, bucket.index, data.nbytes)
        self.spare.sums.pop(bucket.index, None)
        for piece in find_tensor_spans(self.extents, place):
            _elements(self.spare, piece).copy_(_piece_of(data, piece))
        found, wanted = opened.checksum() if device else compute_checksum(data), self.manifest.checksums[bucket.index]
        if found != wanted:
            raise TransferError(f"bucket {bucket.index} of version {bucket.version}: {found} instead of {wanted}")
        self.spare.sums[bucket.index] = wanted

    def _keep(self, bucket: Bucket, size: int) -> None:
        """Take what is served, where it is not in the spare set anyway."""
        place, live, spare = (
            locate_bucket(self.manifest, bucket.index, size),
            self.live,
            self.spare,
        )
        wanted = self.manifest.checksums[bucket.index]
        if spare.sums.get(bucket.index) == wanted:
            return
        if live.layout != spare.layout or live.sums.get(bucket.index) != wanted:
            raise TransferError(f"bucket {bucket.index} of version {bucket.version} is not what is served here")
        for piece in find_tensor_spans(self.extents, place):
            _elements(spare, piece).copy_(_elements(live, piece))
        spare.sums[bucket.index] = wanted


class DoubleBufferedReceiver(StagedReceiver[IncomingTensors]):
    """A `WeightReceiver`. `dtype` is what floating tensors are computed in; None: as they travel.

    `read` opens payloads; left out, those of the heap, of shared memory and of files.
    """

    def __init__(
        self,
        switch: ActivateTensors,
        *,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        threads: int = 1,
        read: OpenPayload | None = None,
    ) -> None:
        super().__init__(lambda: torch.set_num_threads(threads))
        self._switch = switch
        self._dtype = dtype
        self._device = device
        self._live, self._spare = _Weights(), _Weights()
        self._reader = PayloadReader()
        self._read = read or self._reader.buffer

    async def _staged(self, manifest: Manifest) -> IncomingTensors:
        extents, total = compute_layout(manifest.tensors)
        if total != manifest.total_bytes:
            raise TransferError(f"version {manifest.version}: {manifest.total_bytes} bytes, its tensors need {total}")
        self._prepare(manifest)
        return IncomingTensors(manifest=manifest, extents=extents, spare=self._spare, live=self._live, read=self._read)

    async def _serve(self, stage: IncomingTensors) -> None:
        await self._switch(stage.manifest.version, stage.spare.tensors)
        self._live, self._spare = self._spare, self._live

    def reset(self, *, gone: bool) -> None:
        super().reset(gone=gone)
        self._live, self._spare = _Weights(), _Weights()
        self._reader.close()

    def _prepare(self, manifest: Manifest) -> None:
        """A spare tensor for each entry; those of the version before last where they fit."""
        layout, wanted = (manifest.tensors, len(manifest.checksums)), {}
        for entry in manifest.tensors:
            dtype = DTYPES[entry.dtype]
            dtype = self._dtype if self._dtype is not None and dtype.is_floating_point else dtype
            old = self._spare.tensors.get(entry.name)
            fits = old is not None and tuple(old.shape) == entry.shape and old.dtype == dtype
            wanted[entry.name] = (
                old if old is not None and fits else torch.empty(entry.shape, dtype=dtype, device=self._device)
            )
        if layout != self._spare.layout:
            self._spare = _Weights(layout, wanted)


def _elements(weights: _Weights, piece: TensorSpan) -> Tensor:
    return weights.tensors[piece.name].view(-1)[piece.element : piece.element + piece.count]


def _piece_of(data: Any, piece: TensorSpan) -> Tensor:
    """Of bytes of the host, or of a tensor of bytes."""
    if not isinstance(data, Tensor):
        return torch.frombuffer(data, dtype=piece.dtype, count=piece.count, offset=piece.offset)
    here = data[piece.offset : piece.offset + piece.count * piece.dtype.itemsize]
    aligned = here.data_ptr() % piece.dtype.itemsize == 0 and here.storage_offset() % piece.dtype.itemsize == 0
    return (here if aligned else here.clone()).view(piece.dtype)
