"""Versions that never leave the GPU: for trainer and engine in one process on one card.

A version is one flat buffer on the device; a bucket's payload is a piece of it, and its checksum is summed up there. A
published version is complete when `publish` returns, whatever stream its reader works on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_COLUMNS = 1024
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""Spreads the bits of a place; as a signed number."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSlice:
    """A `DevicePayload`."""

    data: Tensor

    def checksum(self) -> str:
        return tensor_checksum(self.data)


class DeviceArena:
    """An `Arena` on `device`; a fresh buffer for each version, freed with its last bucket."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def take(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def view(self, key: Tensor) -> Tensor:
        return key

    def sealed(self, key: Tensor) -> None:
        if key.is_cuda:
            torch.cuda.current_stream(key.device).synchronize()

    def checksum(self, key: Tensor, place: slice) -> str:
        return tensor_checksum(key[place])

    def payload(self, key: Tensor, place: slice) -> DeviceSlice:
        return DeviceSlice(key[place])

    def close(self) -> None:
        """Nothing is kept here."""


def tensor_checksum(data: Tensor) -> str:
    """Two sums over the words of a buffer, weighted by row and by column, and its length. For a buffer on a device.

    It finds what `checksum` finds: torn, lost and overwritten stretches, and pieces in each other's place.
    """
    count = data.numel() // (4 * _COLUMNS) * _COLUMNS
    rest = torch.nn.functional.pad(data[4 * count :], (0, 4 * _COLUMNS - (data.numel() - 4 * count)))
    rows, columns = torch.zeros(2, dtype=torch.int64, device=data.device)
    for part in (data[: 4 * count], rest):
        if part.numel():
            words = part.clone().view(torch.int32) if part.storage_offset() % 4 else part.view(torch.int32)
            words = words.view(-1, _COLUMNS)
            rows = rows * 31 + _weighted(words.sum(1, dtype=torch.int64))
            columns = columns * 31 + _weighted(words.sum(0, dtype=torch.int64))
    found = [number % (1 << 64) for number in torch.stack((rows, columns)).tolist()]
    return f"sum64:{found[0]:016x}{found[1]:016x}:{data.numel()}"


def _weighted(sums: Tensor) -> Tensor:
    return (sums * ((torch.arange(len(sums), device=sums.device) + 1) * _ODD | 1)).sum()
