"""The engine's side of a weight update: a spare buffer beside the weights that are served, and an atomic flip.

Loading runs in a thread of its own, so that generation goes on meanwhile. Implements `WeightReceiver`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from headway.engines.native.parameters import Parameters, Values
from headway.engines.native.staging import Read, Staging
from headway.errors import EngineCrashed, TransferError
from headway.weights.base import Bucket, Manifest


class NativeReceiver:
    """`parameters` is asked for when a version begins; `switch` serves it between two tokens."""

    def __init__(
        self,
        parameters: Callable[[], Awaitable[Parameters]],
        switch: Callable[[Values, int], Awaitable[None]],
        *,
        threads: int = 1,
        read: Read = memoryview,
    ) -> None:
        self.version = -1
        self.gone = False
        """The engine is down: whoever loads is told so."""
        self._parameters = parameters
        self._switch = switch
        self._staging: Staging | None = None
        self._threads = threads
        self._read = read
        self._loader: ThreadPoolExecutor | None = None
        self._served: Values = {}
        """Held so that this decides which thread frees them."""

    async def begin(self, manifest: Manifest) -> None:
        self._check_alive()
        self._staging = None
        self._staging = Staging(manifest, await self._parameters(), self._read)

    async def load(self, bucket: Bucket) -> None:
        self._check_alive()
        staging = self._staging
        if staging is None:
            raise TransferError(f"bucket {bucket.index} of version {bucket.version}: nothing was begun")
        if self._loader is None:
            self._loader = ThreadPoolExecutor(1, "weights", torch.set_num_threads, (self._threads,))
        await asyncio.get_running_loop().run_in_executor(self._loader, staging.load, bucket)
        if self._staging is not staging:
            raise TransferError(f"version {bucket.version} was thrown away, another one was begun meanwhile")

    async def flip(self) -> None:
        self._check_alive()
        staging = self._staging
        if staging is None:
            raise TransferError("no version was begun")
        values, version = staging.values(), staging.manifest.version
        await self._switch(values, version)
        self.version = version
        if self._staging is staging:
            self._staging = None
        spent, self._served = [self._served], values if staging.served_in_place else {}
        del staging
        if self._loader is not None:  # allocators give back what its own thread frees, and keep what another one does
            await asyncio.get_running_loop().run_in_executor(self._loader, spent.clear)

    def reset(self, *, gone: bool) -> None:
        """Forget everything: the engine crashed (`gone`) or came back empty."""
        self.version = -1
        self.gone = gone
        self._staging, self._served = None, {}
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.shutdown(wait=False, cancel_futures=True)

    def _check_alive(self) -> None:
        if self.gone:
            raise EngineCrashed("the engine of this receiver is down")
