"""A version of the weights as one flat run of bytes: where each tensor lies, and how it is cut.

Both sides derive the same layout from the manifest's list of tensors, so nothing but bytes has to travel. A source
lists tensors with larger elements first: then each begins at a multiple of its element, without gaps, and buckets of a
multiple of `ALIGNMENT` never split one. So a bucket can be converted into its destination on its own, in any order.

Does not know where the bytes are: heap, shared memory, a GPU or a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from headway.errors import TransferError
from headway.weights.base import Manifest, TensorEntry

ALIGNMENT = 64
"""Bytes; a multiple of every element."""

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}
"""Every element type that can travel, by its name in a manifest."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Buffer = memoryview
"""Bytes, one dimension."""


Read = Callable[[str], Tensor]
"""A tensor by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where one tensor lies."""

    entry: TensorEntry
    start: int
    """Byte of the flat buffer."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of one tensor that lies in one bucket."""

    name: str
    dtype: torch.dtype
    element: int
    """First element of the flattened tensor."""
    count: int
    offset: int
    """Byte inside the bucket."""


def dtype_name(dtype: torch.dtype) -> str:
    """As it is written in a manifest. Raises `TransferError` for types that do not travel."""
    if dtype not in _NAMES:
        raise TransferError(f"tensors of {dtype} cannot be sent; there are {', '.join(DTYPES)}")
    return _NAMES[dtype]


def entries_of(tensors: Mapping[str, Tensor], wire: torch.dtype | None) -> tuple[TensorEntry, ...]:
    """What a manifest says about `tensors`, larger elements first; floating ones travel as `wire`, or as they are."""
    found = [
        TensorEntry(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype_name(wire if wire is not None and tensor.is_floating_point() else tensor.dtype),
        )
        for name, tensor in tensors.items()
    ]
    return tuple(sorted(found, key=lambda entry: -DTYPES[entry.dtype].itemsize))


def layout_of(entries: Sequence[TensorEntry]) -> tuple[tuple[Extent, ...], int]:
    """Where each tensor lies, and the bytes of the whole."""
    extents, start = [], 0
    for entry in entries:
        size = prod(entry.shape) * _dtype(entry).itemsize
        extents.append(Extent(entry=entry, start=start, size=size))
        start += size
    return tuple(extents), start


def _dtype(entry: TensorEntry) -> torch.dtype:
    if entry.dtype not in DTYPES:
        raise TransferError(f"{entry.name}: unknown element type {entry.dtype!r}")
    return DTYPES[entry.dtype]


def pack(read: Read, extents: Sequence[Extent], buffer: Buffer | Tensor) -> None:
    """Copy what `read` gives into `buffer`, converted to what the entries say."""
    for extent in extents:
        if extent.size:
            here, dtype = buffer[extent.start : extent.start + extent.size], _dtype(extent.entry)
            flat = here.view(dtype) if isinstance(here, Tensor) else torch.frombuffer(here, dtype=dtype)
            flat.copy_(read(extent.entry.name).detach().reshape(-1))


def unpack(buffer: Buffer, extents: Sequence[Extent]) -> dict[str, Tensor]:
    """Views into `buffer`, by name."""
    found = {}
    for extent in extents:
        dtype, shape = _dtype(extent.entry), extent.entry.shape
        flat = torch.frombuffer(buffer[extent.start : extent.start + extent.size], dtype=dtype) if extent.size else None
        found[extent.entry.name] = torch.empty(shape, dtype=dtype) if flat is None else flat.view(shape)
    return found


def cuts(total: int, bucket_bytes: int) -> list[slice]:
    """Bucket after bucket, of `bucket_bytes` rounded up to the alignment; one empty bucket for an empty version."""
    size = max(-(-bucket_bytes // ALIGNMENT), 1) * ALIGNMENT
    return [slice(start, min(start + size, total)) for start in range(0, max(total, 1), size)]


def place_of(manifest: Manifest, index: int, size: int, total: int) -> slice:
    """Which bytes bucket `index` of `size` bytes is. Raises `TransferError` where it cannot be one."""
    last = len(manifest.checksums) - 1
    if not 0 <= index <= last:
        raise TransferError(f"bucket {index} of version {manifest.version}: there are {last + 1}")
    start = total - size if index == last else index * size
    if start < 0 or start + size > total or (index and start % ALIGNMENT):
        raise TransferError(f"bucket {index} of version {manifest.version}: {size} bytes do not fit into {total}")
    return slice(start, start + size)


def pieces_in(extents: Sequence[Extent], place: slice) -> Iterator[Piece]:
    """Which elements of which tensors lie in `place`."""
    for extent in extents:
        first, end = max(extent.start, place.start), min(extent.start + extent.size, place.stop)
        if first < end:
            dtype = _dtype(extent.entry)
            yield Piece(
                name=extent.entry.name,
                dtype=dtype,
                element=(first - extent.start) // dtype.itemsize,
                count=(end - first) // dtype.itemsize,
                offset=first - place.start,
            )
