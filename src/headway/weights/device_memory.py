"""Versions that never leave the GPU: for trainer and engine in one process on one card.

A version is one flat buffer on the device; a bucket's payload is a piece of it, and its checksum is summed up there. A
published version is complete when `publish` returns, whatever stream its reader works on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.errors import TransferError
from headway.weights.base import IpcSlice
from headway.weights.shared_memory import PayloadReader, SharedSegment

_COLUMNS = 1024
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""Spreads the bits of a place; as a signed number."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSlice:
    """A `DevicePayload`."""

    data: Tensor

    def checksum(self) -> str:
        return compute_tensor_checksum(self.data)


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
        return compute_tensor_checksum(key[place])

    def payload(self, key: Tensor, place: slice) -> DeviceSlice:
        return DeviceSlice(key[place])

    def close(self) -> None:
        """Nothing is kept here."""


def compute_tensor_checksum(data: Tensor) -> str:
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


_HELD = 2
"""Buffers that the store may still give out: those of the newest versions."""
_OPEN = 4
"""Buffers that a reader keeps open."""
_REVOKED = 1


class ShareableMemory(Protocol):
    """Memory that another process can open."""

    def empty(self, size: int) -> Tensor:
        """A new buffer of bytes."""
        ...

    def export(self, data: Tensor) -> tuple[Any, ...]:
        """By what it can be opened: numbers, text and bytes."""
        ...

    def opened(self, handle: tuple[Any, ...]) -> Tensor:
        """The buffer of another process. Raises `TransferError` when it is gone or cannot be reached."""
        ...

    def settle(self) -> None:
        """Wait until everything that was asked of the device is done."""
        ...


class CudaMemory:
    """Of a GPU. Handles name it by its UUID: the numbers of GPUs differ from process to process."""

    def __init__(self, device: str = "cuda") -> None:
        self._device = torch.device(device)
        self._seen = {torch.device(self._device.type, self._device.index or 0)}

    def empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def export(self, data: Tensor) -> tuple[Any, ...]:
        number, *words = data.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        return (_uuid(number), *words)

    def opened(self, handle: tuple[Any, ...]) -> Tensor:
        uuid, *words = handle
        here = [number for number in range(torch.cuda.device_count()) if _uuid(number) == uuid]
        if not here:
            raise TransferError(f"the weights lie on GPU {uuid}, which this process does not see")
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            storage = torch.UntypedStorage._new_shared_cuda(here[0], *words)
        except RuntimeError as error:
            raise TransferError(f"memory of GPU {uuid} cannot be opened: {error}") from error
        self._seen.add(storage.device)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def settle(self) -> None:
        for device in self._seen:
            torch.cuda.synchronize(device)


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


@dataclass(slots=True, eq=False)
class _Room:
    """A buffer, and the lease on what it holds now."""

    data: Tensor
    handle: tuple[Any, ...]
    lease: SharedSegment

    def revoked(self) -> bool:
        """Take the lease back; false while somebody reads."""
        if not self.lease.locked(shared=False):
            return False
        self.lease.buffer[0] = _REVOKED  # for who has opened it and was not in time to lock it
        self.lease.close()
        return True


class IpcArena:
    """An `Arena` of buffers that are exported. As many as versions are held, one more, and one for each slow reader."""

    def __init__(self, memory: ShareableMemory) -> None:
        self._memory = memory
        self._rooms: list[_Room] = []
        """The one written last at the end."""

    @property
    def buffers(self) -> int:
        """How many there are."""
        return len(self._rooms)

    def take(self, size: int) -> _Room:
        free = [room for room in self._rooms[:-_HELD] if room.revoked()]
        self._rooms = [room for room in self._rooms if room not in free]
        fits = [room for room in free if room.data.numel() >= size]
        if fits:
            room = _Room(fits[0].data, fits[0].handle, SharedSegment.create(1))
        else:
            data = self._memory.empty(max(size, 1))
            room = _Room(data, self._memory.export(data), SharedSegment.create(1))
        self._rooms.append(room)
        return room

    def view(self, key: _Room) -> Tensor:
        return key.data

    def sealed(self, key: _Room) -> None:
        self._memory.settle()

    def checksum(self, key: _Room, place: slice) -> str:
        return compute_tensor_checksum(key.data[place])

    def payload(self, key: _Room, place: slice) -> IpcSlice:
        return IpcSlice(lease=key.lease.name, handle=key.handle, start=place.start, size=place.stop - place.start)

    def close(self) -> None:
        for room in self._rooms:
            room.lease.close()
        self._rooms.clear()


class IpcPayloadReader:
    """Opens payloads in the process that reads them; other kinds than `IpcSlice` as `PayloadReader` does."""

    def __init__(self, memory: ShareableMemory) -> None:
        self._memory = memory
        self._other = PayloadReader()
        self._lease: SharedSegment | None = None
        self._opened: dict[tuple[Any, ...], Tensor] = {}
        """By handle, the one read last at the end."""

    def buffer(self, payload: Any) -> Any:
        """A `DevicePayload`, or the bytes. Raises `TransferError` when they are gone."""
        if not isinstance(payload, IpcSlice):
            return self._other.buffer(payload)
        if self._lease is None or self._lease.name != payload.lease:
            self._release()
            self._lease = _leased(payload.lease)
        data = self._data(payload.handle)
        end = payload.start + payload.size
        if not 0 <= payload.start <= end <= data.numel():
            raise TransferError(f"bytes {payload.start} to {end} of a buffer of {data.numel()}")
        return DeviceSlice(data[payload.start : end])

    def close(self) -> None:
        """Let everything go."""
        self._release()
        self._opened.clear()
        self._other.close()

    def _data(self, handle: tuple[Any, ...]) -> Tensor:
        data = self._opened.pop(handle, None)
        if data is None:
            while len(self._opened) >= _OPEN:
                del self._opened[next(iter(self._opened))]
            data = self._memory.opened(handle)
        self._opened[handle] = data
        return data

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._memory.settle()  # copies out of it may still be under way
            lease.close()


def _leased(name: str) -> SharedSegment:
    """Until it is closed. Raises `TransferError` where the buffer holds another version by now."""
    lease = SharedSegment.attach(name)
    if lease.locked(shared=True) and lease.buffer[0] != _REVOKED:
        return lease
    lease.close()
    raise TransferError("these weights are there no longer: their buffer holds another version")
