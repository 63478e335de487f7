"""Versions on a GPU: read in the same process, or by other processes of the same machine (CUDA IPC).

    store = WeightStore(arena=DeviceArena("cuda"))                            trainer and engine in one process

    store = WeightStore(arena=IpcArena(CudaMemory("cuda")))                   in the trainer's process
    open_payload = IpcPayloadReader(CudaMemory("cuda")).open                  in an engine's
    DoubleBufferedReceiver(activate, device="cuda", open_payload=open_payload)

A version is one flat buffer on the device. A bucket is a part of it, and its checksum is computed there. A published
version is complete when `publish` returns, whatever stream its reader works on. docs/architecture.md describes leases:
a buffer is overwritten only when no process reads it. A reader that comes too late, or on another machine, gets a
`TransferError`. Only `CudaMemory` uses CUDA; any memory that can be opened by a handle will do. Devices that are only
logical, on a CPU, have `HostMemory`. Where several trainer ranks publish a version, a reader opens the copy of one.
"""

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.errors import TransferError
from headway.weights.base import IpcCopies, IpcSlice
from headway.weights.shared_memory import PayloadReader, SharedSegment
from headway.weights.weight_store import Arena

_COLUMNS = 1024
_ROWS = 8192
"""Rows that are summed at once: 32 MiB, which become several times as much while they are summed."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd factor that spreads the bits of a position, as a signed number."""
_HELD_BUFFERS = 2
"""Buffers of the newest versions, which the store may still give out."""
_OPEN_BUFFERS = 4
"""Buffers that a reader keeps open."""
_REVOKED = 1


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSlice:
    """A `DevicePayload` in a flat buffer."""

    data: Tensor
    handle: tuple[Any, ...] | None = None
    """Opens the whole buffer, where that is of another process."""

    def checksum(self) -> str:
        return compute_tensor_checksum(self.data)


class DeviceArena(Arena):
    """Memory of a device of this process: a new buffer for each version, freed with its last bucket."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def take(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def seal(self, key: Tensor) -> None:
        if key.is_cuda:
            torch.cuda.current_stream(key.device).synchronize()

    def checksum(self, key: Tensor, place: slice) -> str:
        return compute_tensor_checksum(key[place])

    def payload(self, key: Tensor, place: slice) -> DeviceSlice:
        return DeviceSlice(key[place])


def compute_tensor_checksum(data: Tensor) -> str:
    """Return two weighted sums over the words of a buffer, by row and by column, and its length. Made for devices.

    It finds what `compute_checksum` finds: torn, lost, overwritten and exchanged parts.
    """
    count = data.numel() // (4 * _COLUMNS) * _COLUMNS
    rest = torch.nn.functional.pad(data[4 * count :], (0, 4 * _COLUMNS - (data.numel() - 4 * count)))
    rows, columns = torch.zeros(2, dtype=torch.int64, device=data.device)
    for part in (data[: 4 * count], rest):
        if part.numel():
            words = part.clone().view(torch.int32) if part.storage_offset() % 4 else part.view(torch.int32)
            pieces = torch.split(words.view(-1, _COLUMNS), _ROWS)
            rows = rows * 31 + _weigh(torch.cat([piece.sum(1, dtype=torch.int64) for piece in pieces]))
            columns = columns * 31 + _weigh(torch.stack([piece.sum(0, dtype=torch.int64) for piece in pieces]).sum(0))
    found = [number % (1 << 64) for number in torch.stack((rows, columns)).tolist()]
    return f"sum64:{found[0]:016x}{found[1]:016x}:{data.numel()}"


def _weigh(sums: Tensor) -> Tensor:
    return (sums * ((torch.arange(len(sums), device=sums.device) + 1) * _ODD | 1)).sum()


class ShareableMemory(Protocol):
    """Memory that another process can open."""

    def empty(self, size: int) -> Tensor:
        """Return a new buffer of bytes."""

    def export(self, data: Tensor) -> tuple[Any, ...]:
        """Return the handle by which a buffer can be opened: numbers, text and bytes."""

    def open(self, handle: tuple[Any, ...]) -> Tensor:
        """Open the buffer of another process. Raises `TransferError` if it is gone or cannot be reached."""

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""


class CudaMemory:
    """Memory of a GPU. Handles name the GPU by its UUID, because numbers of GPUs differ between processes."""

    def __init__(self, device: str = "cuda") -> None:
        self._device = torch.device(device)
        self._devices = {torch.device(self._device.type, self._device.index or 0)}

    def empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def export(self, data: Tensor) -> tuple[Any, ...]:
        number, *words = data.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        return (_get_uuid(number), *words)

    def open(self, handle: tuple[Any, ...]) -> Tensor:
        uuid, *words = handle
        here = [number for number in range(torch.cuda.device_count()) if _get_uuid(number) == uuid]
        if not here:
            raise TransferError(f"the weights lie on GPU {uuid}, which this process does not see")
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            storage = torch.UntypedStorage._new_shared_cuda(here[0], *words)
        except RuntimeError as error:
            raise TransferError(f"memory of GPU {uuid} cannot be opened: {error}") from error
        self._devices.add(storage.device)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def synchronize(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)


def make_tensor_arguments(
    handle: tuple[Any, ...], shape: tuple[int, ...], start: int, dtype: torch.dtype = torch.uint8
) -> tuple[Any, ...]:
    """Return the arguments by which `rebuild_cuda_tensor` of torch makes a tensor in a buffer of another process.

    `handle` is what `CudaMemory.export` returned, `start` the first element. The device is the name of the GPU, which
    readers replace by their own number.
    """
    uuid, storage, size_bytes, offset_bytes, *counter = handle
    strides = torch.empty(shape, device="meta").stride()
    tensor = (Tensor, tuple(shape), strides, start, torch.storage.TypedStorage, dtype)
    return (*tensor, uuid, storage, size_bytes, offset_bytes, False, *counter)


class HostMemory:
    """Shared memory of the host in the place of a GPU's, for devices that are only logical."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        """Segment of each buffer by its address."""

    def empty(self, size: int) -> Tensor:
        segment = SharedSegment.create(size)
        data = torch.frombuffer(segment.buffer, dtype=torch.uint8)
        self._names[data.data_ptr()] = segment.name
        weakref.finalize(data, segment.close)
        return data

    def export(self, data: Tensor) -> tuple[Any, ...]:
        return (self._names[data.data_ptr()],)

    def open(self, handle: tuple[Any, ...]) -> Tensor:
        segment = SharedSegment.attach(handle[0])
        data = torch.frombuffer(segment.buffer, dtype=torch.uint8)
        segment.close()  # the tensor keeps it mapped
        return data

    def synchronize(self) -> None:
        """Do nothing: no copy is ever under way."""


def make_shareable_memory(device: str) -> ShareableMemory:
    """Return the memory of a GPU, or of the host for a logical device of the CPU."""
    return CudaMemory(device) if torch.device(device).type == "cuda" else HostMemory()


def _get_uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


@dataclass(slots=True, eq=False)
class _LeasedBuffer:
    """A buffer, and the lease on the version in it."""

    data: Tensor
    handle: tuple[Any, ...]
    lease: SharedSegment

    def try_revoke(self) -> bool:
        """Revoke the lease. Returns false while a process reads the version."""
        if not self.lease.try_lock(shared=False):
            return False
        self.lease.buffer[0] = _REVOKED  # for a reader that has opened the lease and not locked it yet
        self.lease.close()
        return True


class IpcArena(Arena):
    """Buffers that are exported: one for each of `held` versions, one more, and one for each slow reader.

    Where one version is held, the next one is written over it. `rank` is the trainer rank that publishes here.
    """

    def __init__(self, memory: ShareableMemory, rank: int = 0, *, held: int = _HELD_BUFFERS) -> None:
        self._memory, self._rank = memory, rank
        self._untouched = held if held > 1 else 0
        self._buffers: list[_LeasedBuffer] = []
        """Ordered by when they were last written."""

    @property
    def buffers(self) -> int:
        """Number of buffers."""
        return len(self._buffers)

    def take(self, size: int) -> _LeasedBuffer:
        free = [old for old in self._buffers[: max(len(self._buffers) - self._untouched, 0)] if old.try_revoke()]
        self._buffers = [old for old in self._buffers if old not in free]
        fitting = next((old for old in free if old.data.numel() >= size), None)
        data = self._memory.empty(max(size, 1)) if fitting is None else fitting.data
        handle = self._memory.export(data) if fitting is None else fitting.handle
        self._buffers.append(_LeasedBuffer(data, handle, SharedSegment.create(1)))
        return self._buffers[-1]

    def view(self, key: _LeasedBuffer) -> Tensor:
        return key.data

    def seal(self, key: _LeasedBuffer) -> None:
        self._memory.synchronize()

    def checksum(self, key: _LeasedBuffer, place: slice) -> str:
        return compute_tensor_checksum(key.data[place])

    def payload(self, key: _LeasedBuffer, place: slice) -> IpcSlice:
        size = place.stop - place.start
        return IpcSlice(lease=key.lease.name, handle=key.handle, start=place.start, size=size, rank=self._rank)

    def close(self) -> None:
        for old in self._buffers:
            old.lease.close()
        self._buffers.clear()


class IpcPayloadReader:
    """Opens payloads in the process that reads them: an `IpcSlice` on the device, others as `PayloadReader` does.

    Of several copies it opens that of `rank`.
    """

    def __init__(self, memory: ShareableMemory, rank: int = 0) -> None:
        self._memory, self._rank = memory, rank
        self._other = PayloadReader()
        self._lease: SharedSegment | None = None
        self._opened: dict[tuple[Any, ...], Tensor] = {}
        """Buffers by handle, ordered by when they were last read."""

    def open(self, payload: Any) -> Any:
        """Return a `DevicePayload`, or the bytes. Raises `TransferError` if they are gone."""
        if isinstance(payload, IpcCopies):
            payload = payload.choose(self._rank)
        if not isinstance(payload, IpcSlice):
            return self._other.open(payload)
        if self._lease is None or self._lease.name != payload.lease:
            self.release()
            self._lease = _lock_lease(payload.lease)
        data = self._open_buffer(payload.handle)
        end = payload.start + payload.size
        if not 0 <= payload.start <= end <= data.numel():
            raise TransferError(f"bytes {payload.start} to {end} of a buffer of {data.numel()}")
        return DeviceSlice(data[payload.start : end], payload.handle)

    def close(self) -> None:
        """Release everything."""
        self.release()
        self._opened.clear()
        self._other.close()

    def _open_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        data = self._opened.pop(handle, None)
        if data is None:
            while len(self._opened) >= _OPEN_BUFFERS:
                del self._opened[next(iter(self._opened))]
            data = self._memory.open(handle)
        self._opened[handle] = data
        return data

    def release(self) -> None:
        """Give the version that was read last back to its trainer, which may overwrite it."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._memory.synchronize()  # copies out of it may still be running
            lease.close()


def _lock_lease(name: str) -> SharedSegment:
    """Lock a lease until it is closed. Raises `TransferError` if the buffer holds another version by now."""
    lease = SharedSegment.attach(name)
    if lease.try_lock(shared=True) and lease.buffer[0] != _REVOKED:
        return lease
    lease.close()
    raise TransferError("these weights are there no longer: their buffer holds another version")
