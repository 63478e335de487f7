"""The engine's side: a spare set of tensors that buckets are converted into, and the flip to it.

    receiver = SpareReceiver(engine.switch, dtype=torch.float32)

Buckets are converted straight from where they lie (heap or shared memory) into the spare tensors, on a thread of their
own; nothing is staged in between. The checksum is counted after the copy: a buffer that is overwritten while it is read
is found out. `flip` hands the spare tensors to `switch`, which makes them live between two actions; those that were
live become the spare ones of the next version, so `switch` must not return while anything still computes with them.

A bucket that did not change (`Kept`) is copied from the live tensors, unless the spare ones hold it already: frozen
parts of a model cost nothing from the third version on.

Guarantees: `switch` sees complete, verified versions only, and `version` is what it last accepted. Any order, any
repetition of buckets. Does not know what an engine is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headway.errors import EngineCrashed, TransferError
from headway.weights.base import Bucket, Kept, Manifest, TensorEntry, checksum
from headway.weights.flat import DTYPES, Buffer, Extent, Piece, layout_of, pieces_in, place_of
from headway.weights.segment import SharedReader

Switch = Callable[[int, Mapping[str, Tensor]], Awaitable[None]]
"""Make these tensors the ones that the engine computes with, between two actions."""


@dataclass(slots=True, eq=False)
class _Weights:
    """One set of tensors, and what is known to lie in it."""

    layout: tuple[tuple[TensorEntry, ...], int] = ((), 0)
    """Tensors and number of buckets of the versions that it can hold."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[int, str] = field(default_factory=dict)
    """By bucket: the checksum of what was last loaded and verified there."""


class SpareReceiver:
    """A `WeightReceiver`. `dtype` is what floating tensors are computed in; None: as they travel.

    `read` opens payloads; left out, those of the heap, of shared memory and of files.
    """

    def __init__(
        self,
        switch: Switch,
        *,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        threads: int = 1,
        read: Callable[[Any], Buffer] | None = None,
    ) -> None:
        self.version = -1
        self.gone = False
        """The engine is down: whoever loads is told so."""
        self._switch = switch
        self._dtype = dtype
        self._device = device
        self._live, self._spare = _Weights(), _Weights()
        self._manifest: Manifest | None = None
        self._extents: tuple[Extent, ...] = ()
        self._total = 0
        self._loaded: set[int] = set()
        self._reader = SharedReader()
        self._read = read or self._reader.buffer
        self._threads = threads
        self._loader: ThreadPoolExecutor | None = None

    async def begin(self, manifest: Manifest) -> None:
        self._check_alive()
        extents, total = layout_of(manifest.tensors)
        if total != manifest.total_bytes:
            raise TransferError(f"version {manifest.version}: {manifest.total_bytes} bytes, its tensors need {total}")
        self._manifest, self._extents, self._total = manifest, extents, total
        self._loaded = set()
        self._prepare(manifest)

    async def load(self, bucket: Bucket) -> None:
        self._check_alive()
        manifest = self._manifest
        where = f"bucket {bucket.index} of version {bucket.version}"
        if manifest is None or manifest.version != bucket.version:
            begun = "nothing" if manifest is None else f"version {manifest.version}"
            raise TransferError(f"{where}: {begun} was begun")
        if self._loader is None:
            self._loader = ThreadPoolExecutor(
                1, "weights", initializer=torch.set_num_threads, initargs=(self._threads,)
            )
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._loader, self._fill, manifest, bucket, self._spare)
        if self._manifest is not manifest:
            raise TransferError(f"{where}: thrown away, another version was begun meanwhile")
        self._loaded.add(bucket.index)

    async def flip(self) -> None:
        self._check_alive()
        manifest = self._manifest
        if manifest is None:
            raise TransferError("no version was begun")
        missing = len(manifest.checksums) - len(self._loaded)
        if missing:
            raise TransferError(f"version {manifest.version} lacks {missing} of {len(manifest.checksums)} buckets")
        await self._switch(manifest.version, self._spare.tensors)
        self._live, self._spare = self._spare, self._live
        self.version, self._manifest = manifest.version, None

    def reset(self, *, gone: bool) -> None:
        """Forget everything: the engine crashed (`gone`) or came back empty."""
        self.version, self.gone = -1, gone
        self._manifest, self._loaded = None, set()
        self._live, self._spare = _Weights(), _Weights()
        self._reader.close()
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.shutdown(wait=False, cancel_futures=True)

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

    def _fill(self, manifest: Manifest, bucket: Bucket, spare: _Weights) -> None:
        """Copy, then verify. On a thread."""
        if isinstance(bucket.payload, Kept):
            self._keep(manifest, bucket, bucket.payload.size, spare)
            return
        data = self._read(bucket.payload)
        place = place_of(manifest, bucket.index, data.nbytes, self._total)
        spare.sums.pop(bucket.index, None)
        for piece in pieces_in(self._extents, place):
            source = torch.frombuffer(data, dtype=piece.dtype, count=piece.count, offset=piece.offset)
            _elements(spare, piece).copy_(source)
        found, wanted = checksum(data), manifest.checksums[bucket.index]
        if found != wanted:
            raise TransferError(f"bucket {bucket.index} of version {bucket.version}: {found} instead of {wanted}")
        spare.sums[bucket.index] = wanted

    def _keep(self, manifest: Manifest, bucket: Bucket, size: int, spare: _Weights) -> None:
        """Take what is served, where it is not in the spare set anyway."""
        place, live = place_of(manifest, bucket.index, size, self._total), self._live
        wanted = manifest.checksums[bucket.index]
        if spare.sums.get(bucket.index) == wanted:
            return
        if live.layout != spare.layout or live.sums.get(bucket.index) != wanted:
            raise TransferError(f"bucket {bucket.index} of version {bucket.version} is not what is served here")
        for piece in pieces_in(self._extents, place):
            _elements(spare, piece).copy_(_elements(live, piece))
        spare.sums[bucket.index] = wanted

    def _check_alive(self) -> None:
        if self.gone:
            raise EngineCrashed("the engine of this receiver is down")


def _elements(weights: _Weights, piece: Piece) -> Tensor:
    return weights.tensors[piece.name].view(-1)[piece.element : piece.element + piece.count]
