"""The server's side of a weight update: buckets become a directory, and the server is told to load it.

A bucket is verified against the manifest after it was written, so that memory which is overwritten while it is read
is found out. `flip` hands a whole, verified directory to `switch`. The directory that is served stays on the disk, the
ones before it are removed. Implements `WeightReceiver`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headway.engines.servers.files import Draft, remove_others
from headway.errors import EngineCrashed, TransferError
from headway.weights.base import Bucket, DevicePayload, Manifest, checksum

Switch = Callable[[int, Path], Awaitable[None]]
"""Serve what is in the directory as this version."""


class DirectoryReceiver:
    """`read` opens payloads that are no buffers themselves; `beside` is what else a checkpoint consists of."""

    def __init__(
        self, root: Path, switch: Switch, *, beside: Path | None = None, read: Callable[[Any], Any] = memoryview
    ) -> None:
        self.version = -1
        self.gone = False
        """The engine is down: whoever loads is told so."""
        self._root = root
        self._switch = switch
        self._beside = beside
        self._read = read
        self._draft: Draft | None = None
        self._loaded: set[int] = set()
        self._disk: ThreadPoolExecutor | None = None

    async def begin(self, manifest: Manifest) -> None:
        self._check_alive()
        self._forget()
        draft = await self._on_disk(lambda: Draft(self._root, manifest, beside=self._beside))
        if self.gone:
            draft.close()
        self._check_alive()
        self._draft = draft

    async def load(self, bucket: Bucket) -> None:
        self._check_alive()
        draft, where = self._draft, f"bucket {bucket.index} of version {bucket.version}"
        if draft is None or draft.manifest.version != bucket.version:
            begun = "nothing" if draft is None else f"version {draft.manifest.version}"
            raise TransferError(f"{where}: {begun} was begun")
        self._loaded.discard(bucket.index)
        await self._on_disk(lambda: self._fill(draft, bucket))
        if self._draft is not draft:
            raise TransferError(f"{where}: thrown away, another version was begun meanwhile")
        self._loaded.add(bucket.index)

    async def flip(self) -> None:
        self._check_alive()
        draft = self._draft
        if draft is None:
            raise TransferError("no version was begun")
        version, wanted = draft.manifest.version, len(draft.manifest.checksums)
        if len(self._loaded) < wanted:
            raise TransferError(f"version {version} lacks {wanted - len(self._loaded)} of {wanted} buckets")
        self._forget()
        directory = await self._on_disk(draft.sealed)
        await self._switch(version, directory)
        self.version = version
        await self._on_disk(lambda: remove_others(self._root, directory))

    def reset(self, *, gone: bool) -> None:
        """Forget everything: the engine crashed (`gone`) or came back empty."""
        self.version, self.gone = -1, gone
        self._forget()
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.shutdown(wait=False)

    def _fill(self, draft: Draft, bucket: Bucket) -> None:
        """Write, then verify. On the thread."""
        payload = bucket.payload
        device = isinstance(payload, DevicePayload)
        data = memoryview(payload.data.cpu().numpy() if device else self._read(payload)).cast("B")
        if not 0 <= bucket.index < len(draft.manifest.checksums):
            raise TransferError(f"bucket {bucket.index} of version {bucket.version}: no such bucket")
        draft.write(bucket.index, data)
        found, wanted = payload.checksum() if device else checksum(data), draft.manifest.checksums[bucket.index]
        if found != wanted:
            raise TransferError(f"bucket {bucket.index} of version {bucket.version}: {found} instead of {wanted}")

    async def _on_disk(self, work: Callable[[], Any]) -> Any:
        """One thing after the other, on a thread of its own."""
        if self._disk is None:
            self._disk = ThreadPoolExecutor(1, "weights")
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    def _forget(self) -> None:
        draft, self._draft, self._loaded = self._draft, None, set()
        if draft is not None and self._disk is not None:
            self._disk.submit(draft.close)

    def _check_alive(self) -> None:
        if self.gone:
            raise EngineCrashed("the engine of this receiver is down")
