"""The engine's side of a transfer: a spare set of tensors that buckets are converted into, and the flip to it.

    receiver = DoubleBufferedReceiver(engine.activate, dtype=torch.float32)

Buckets are converted straight from where they lie into the spare tensors, on a thread of their own. The checksum is
computed after the copy, so that a buffer that is overwritten while it is read does not go unnoticed. `flip` passes the
spare tensors to `activate`, which makes them live between two actions. The tensors that were live become the spare ones
of the next version, so `activate` must not return while anything still computes with them.

A bucket that did not change (`UnchangedBucket`) is copied from the live tensors, unless the spare ones hold it already:
frozen parts of a model cost nothing from the third version on.

Guarantees: `activate` gets complete, verified versions only, and `version` is what it last accepted. Buckets may come
in any order and repeatedly.
"""

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
    OpenPayload,
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
    compute_manifest_layout,
    find_tensor_spans,
    locate_bucket,
)

ActivateTensors = Callable[[int, Mapping[str, Tensor]], Awaitable[None]]
"""Makes these tensors of a version the ones that the engine computes with, between two actions."""


@dataclass(slots=True, eq=False)
class _TensorSet:
    """One set of tensors, and which buckets are in it."""

    layout: tuple[tuple[TensorEntry, ...], int] = ((), 0)
    """Tensors and number of buckets of the versions that fit."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[int, str] = field(default_factory=dict)
    """Checksum by bucket of what was last loaded and verified."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IncomingTensors:
    """A version that is loaded into the spare tensors."""

    manifest: Manifest
    extents: tuple[TensorExtent, ...]
    spare: _TensorSet
    live: _TensorSet
    open_payload: OpenPayload

    def load(self, bucket: Bucket) -> None:
        """Copy a bucket, then verify it."""
        if isinstance(bucket.payload, UnchangedBucket):
            self._copy_from_live(bucket, bucket.payload.size)
            return
        opened: Any = bucket.payload if isinstance(bucket.payload, DevicePayload) else self.open_payload(bucket.payload)
        device = isinstance(opened, DevicePayload)
        data = opened.data if device else opened
        place = locate_bucket(self.manifest, bucket.index, data.nbytes)
        self.spare.sums.pop(bucket.index, None)
        for span in find_tensor_spans(self.extents, place):
            _get_elements(self.spare, span).copy_(_view_span(data, span))
        found = opened.checksum() if device else compute_checksum(data)
        self.manifest.verify(bucket, found)
        self.spare.sums[bucket.index] = found

    def _copy_from_live(self, bucket: Bucket, size: int) -> None:
        """Copy what is served into the spare tensors, unless they hold it already."""
        place, live, spare = locate_bucket(self.manifest, bucket.index, size), self.live, self.spare
        wanted = self.manifest.checksums[bucket.index]
        if spare.sums.get(bucket.index) == wanted:
            return
        if live.layout != spare.layout or live.sums.get(bucket.index) != wanted:
            raise TransferError(f"{bucket.describe()} is not what is served here")
        for span in find_tensor_spans(self.extents, place):
            _get_elements(spare, span).copy_(_get_elements(live, span))
        spare.sums[bucket.index] = wanted


class DoubleBufferedReceiver(StagedReceiver[IncomingTensors]):
    """A `WeightReceiver` with two sets of tensors.

    `dtype` is the type that floating tensors are computed in; `None`: as they are sent. `open_payload` opens payloads;
    left out, those that a `PayloadReader` can open. `release_payloads` closes what a version was read from.
    """

    def __init__(
        self,
        activate: ActivateTensors,
        *,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        threads: int = 1,
        open_payload: OpenPayload | None = None,
        release_payloads: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(lambda: torch.set_num_threads(threads), release_payloads)
        self._activate = activate
        self._dtype = dtype
        self._device = device
        self._live, self._spare = _TensorSet(), _TensorSet()
        self._reader = PayloadReader()
        self._open_payload = open_payload or self._reader.open

    async def _make_stage(self, manifest: Manifest) -> IncomingTensors:
        extents = compute_manifest_layout(manifest)
        self._prepare_spare(manifest)
        return IncomingTensors(
            manifest=manifest, extents=extents, spare=self._spare, live=self._live, open_payload=self._open_payload
        )

    async def _serve(self, stage: IncomingTensors) -> None:
        await self._activate(stage.manifest.version, stage.spare.tensors)
        self._live, self._spare = self._spare, self._live

    def reset(self, *, gone: bool) -> None:
        super().reset(gone=gone)
        self._live, self._spare = _TensorSet(), _TensorSet()
        self._reader.close()

    def _prepare_spare(self, manifest: Manifest) -> None:
        """Make a spare tensor for each entry, or use that of the version before last where it fits."""
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
            self._spare = _TensorSet(layout, wanted)


def _get_elements(weights: _TensorSet, span: TensorSpan) -> Tensor:
    return weights.tensors[span.name].view(-1)[span.element : span.element + span.count]


def _view_span(data: Any, span: TensorSpan) -> Tensor:
    """Return the elements of a span from bytes of the host, or from a tensor of bytes."""
    if not isinstance(data, Tensor):
        return torch.frombuffer(data, dtype=span.dtype, count=span.count, offset=span.offset)
    here = data[span.offset : span.offset + span.count * span.dtype.itemsize]
    aligned = here.data_ptr() % span.dtype.itemsize == 0 and here.storage_offset() % span.dtype.itemsize == 0
    return (here if aligned else here.clone()).view(span.dtype)
