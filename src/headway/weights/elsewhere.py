"""The store of a process that helps to gather weights which another one publishes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import torch
from torch import Tensor

from headway.errors import TransferError
from headway.weights.base import Bucket, Manifest
from headway.weights.flat import Read, entries_of


class Elsewhere:
    """The store of the ranks that publish nothing: helps to gather what rank 0 publishes, in the same order."""

    def __init__(self, wire: torch.dtype | None) -> None:
        self._wire = wire

    def publish(self, version: int, tensors: Mapping[str, Tensor], read: Read | None = None) -> None:
        for entry in entries_of(tensors, self._wire):
            if read is not None and all(entry.shape):
                read(entry.name)

    def clear(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""

    async def gather(self, version: int) -> tuple[Manifest, AsyncIterator[Bucket]]:
        raise TransferError(f"version {version} is published by rank 0")
