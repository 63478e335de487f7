"""The engine's side of a weight update: a spare buffer beside the weights that are served, and an atomic flip.

A version is laid out for serving while it arrives (`staging`). Implements `WeightReceiver`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import torch

from headway.engines.native.parameters import Parameters, Values
from headway.engines.native.staging import Read, Staging
from headway.weights.base import Manifest, StagedReceiver


class NativeReceiver(StagedReceiver[Staging]):
    """`parameters` is asked for when a version begins; `switch` serves it between two tokens."""

    def __init__(
        self,
        parameters: Callable[[], Awaitable[Parameters]],
        switch: Callable[[Values, int], Awaitable[None]],
        *,
        threads: int = 1,
        read: Read = memoryview,
    ) -> None:
        super().__init__(lambda: torch.set_num_threads(threads))
        self._parameters = parameters
        self._switch = switch
        self._read = read
        self._served: Values = {}
        """Held so that this decides which thread frees them."""
        self._spent: list[Values] = []

    async def _staged(self, manifest: Manifest) -> Staging:
        return Staging(manifest, await self._parameters(), self._read)

    async def _serve(self, stage: Staging) -> None:
        values = stage.values()
        await self._switch(values, stage.manifest.version)
        self._spent, self._served = [self._served], values if stage.served_in_place else {}

    async def _settle(self) -> None:
        if self._loader is not None:  # allocators give back what its own thread frees, and keep what another one does
            await self._off_the_loop(self._spent.clear)

    def reset(self, *, gone: bool) -> None:
        super().reset(gone=gone)
        self._served, self._spent = {}, []
