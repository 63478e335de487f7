"""A version of the weights as one flat run of bytes: where each tensor lies, and how it is cut into buckets and files.

Both sides derive the same layout from the manifest's list of tensors, so nothing but bytes has to travel. A source
lists tensors with larger elements first: then each begins at a multiple of its element, without gaps, and buckets of a
multiple of `ALIGNMENT` never split an element. So each bucket can be converted on its own, in any order.

A safetensors shard holds whole tensors in the order of the manifest. Its data are the bytes of the version from the
first of them to the last: other programs load it by name, and a bucket is one or two ranges of bytes in the shards.
"""

import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from headway.errors import TransferError
from headway.weights.base import Manifest, TensorEntry

ALIGNMENT = 64
"""Bytes, a multiple of the size of every element."""

_SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in _SAFETENSORS_NAMES}
"""Every element type that can be sent, by its name in a manifest."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Buffer = memoryview
"""Bytes in one dimension."""
ReadTensor = Callable[[str], Tensor]
"""Returns a tensor by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorExtent:
    """The place of one tensor."""

    entry: TensorEntry
    start: int
    """Byte of the flat buffer."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpan:
    """The part of one tensor that lies in one bucket."""

    name: str
    dtype: torch.dtype
    element: int
    """First element of the flattened tensor."""
    count: int
    offset: int
    """Byte inside the bucket."""


def get_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of an element type in a manifest. Raises `TransferError` for types that cannot be sent."""
    if dtype not in _DTYPE_NAMES:
        raise TransferError(f"tensors of {dtype} cannot be sent; there are {', '.join(DTYPES)}")
    return _DTYPE_NAMES[dtype]


def make_tensor_entries(tensors: Mapping[str, Tensor], wire_dtype: torch.dtype | None) -> tuple[TensorEntry, ...]:
    """List `tensors` for a manifest, larger elements first. Floating ones are sent as `wire_dtype`, or as they are."""
    found = [
        TensorEntry(
            name=name,
            shape=tuple(tensor.shape),
            dtype=get_dtype_name(wire_dtype if wire_dtype and tensor.is_floating_point() else tensor.dtype),
        )
        for name, tensor in tensors.items()
    ]
    return tuple(sorted(found, key=lambda entry: -DTYPES[entry.dtype].itemsize))


def compute_layout(entries: Sequence[TensorEntry]) -> tuple[tuple[TensorExtent, ...], int]:
    """Return where each tensor lies, and the number of bytes of all."""
    extents, start = [], 0
    for entry in entries:
        size = prod(entry.shape) * get_dtype(entry).itemsize
        extents.append(TensorExtent(entry=entry, start=start, size=size))
        start += size
    return tuple(extents), start


def compute_manifest_layout(manifest: Manifest) -> tuple[TensorExtent, ...]:
    """Return where each tensor lies. Raises `TransferError` if the manifest says another number of bytes."""
    extents, total = compute_layout(manifest.tensors)
    if total != manifest.total_bytes:
        raise TransferError(f"version {manifest.version}: {manifest.total_bytes} bytes, its tensors need {total}")
    return extents


def get_dtype(entry: TensorEntry) -> torch.dtype:
    """Return the element type of a tensor. Raises `TransferError` for a name that is unknown."""
    if entry.dtype not in DTYPES:
        raise TransferError(f"{entry.name}: unknown element type {entry.dtype!r}")
    return DTYPES[entry.dtype]


def pack_tensors(read: ReadTensor, extents: Sequence[TensorExtent], buffer: Buffer | Tensor) -> None:
    """Copy the tensors that `read` returns into `buffer`, converted to the types of their entries."""
    for extent in extents:
        if extent.size:
            here, dtype = buffer[extent.start : extent.start + extent.size], get_dtype(extent.entry)
            flat = here.view(dtype) if isinstance(here, Tensor) else torch.frombuffer(here, dtype=dtype)
            flat.copy_(read(extent.entry.name).detach().reshape(-1))


def split_into_buckets(total: int, bucket_bytes: int) -> list[slice]:
    """Cut a version into buckets of `bucket_bytes`, rounded up to the alignment. An empty version is one bucket."""
    size = max(-(-bucket_bytes // ALIGNMENT), 1) * ALIGNMENT
    return [slice(start, min(start + size, total)) for start in range(0, max(total, 1), size)]


def locate_bucket(manifest: Manifest, index: int, size: int) -> slice:
    """Return which bytes bucket `index` of `size` bytes is. Raises `TransferError` if it splits an element."""
    place = manifest.locate_bucket(index, size)
    if index and place.start % ALIGNMENT:
        raise TransferError(f"bucket {index} of version {manifest.version}: {size} bytes are not aligned")
    return place


def find_tensor_spans(extents: Sequence[TensorExtent], place: slice) -> Iterator[TensorSpan]:
    """Yield which elements of which tensors lie in `place`."""
    for extent in extents:
        first, end = max(extent.start, place.start), min(extent.start + extent.size, place.stop)
        if first < end:
            dtype = get_dtype(extent.entry)
            yield TensorSpan(
                name=extent.entry.name,
                dtype=dtype,
                element=(first - extent.start) // dtype.itemsize,
                count=(end - first) // dtype.itemsize,
                offset=first - place.start,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsShard:
    """One file of a version."""

    file: str
    tensors: tuple[TensorEntry, ...]
    start: int
    """Byte of the version that its data begin with."""
    size: int
    """Bytes of data."""

    def head(self) -> bytes:
        """Return what stands before the data: length and JSON, padded so that the data are aligned."""
        fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
        place = 0
        for entry in self.tensors:
            end = place + prod(entry.shape) * DTYPES[entry.dtype].itemsize
            fields[entry.name] = {
                "dtype": _SAFETENSORS_NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [place, end],
            }
            place = end
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def split_into_shards(entries: Sequence[TensorEntry], shard_bytes: int) -> tuple[SafetensorsShard, ...]:
    """Put whole tensors, in order, into files of about `shard_bytes`. A larger tensor gets a file of its own."""
    counts, filled = [0], 0
    for extent in compute_layout(entries)[0]:
        if counts[-1] and filled + extent.size > shard_bytes:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += extent.size
    return make_shards(entries, counts)


def make_shards(entries: Sequence[TensorEntry], counts: Sequence[int]) -> tuple[SafetensorsShard, ...]:
    """Return the files of a version, given the number of tensors in each."""
    shards, first, start = [], 0, 0
    for number, count in enumerate(counts, start=1):
        tensors = tuple(entries[first : first + count])
        file, size = f"model-{number:05d}-of-{len(counts):05d}.safetensors", compute_layout(tensors)[1]
        shards.append(SafetensorsShard(file=file, tensors=tensors, start=start, size=size))
        first, start = first + count, start + size
    return tuple(shards)


def make_shard_index(shards: Sequence[SafetensorsShard]) -> dict[str, object]:
    """Return the content of `model.safetensors.index.json`: which file has which tensor."""
    return {
        "metadata": {"total_size": sum(shard.size for shard in shards)},
        "weight_map": {entry.name: shard.file for shard in shards for entry in shard.tensors},
    }


def write_shard(path: Path, head: bytes, parts: Sequence[Buffer]) -> None:
    """Write a file from parts of the version."""
    with path.open("wb", buffering=0) as file:
        for part in (memoryview(head), *parts):
            written = 0
            while written < part.nbytes:
                written += file.write(part[written:])


def link_shard(old: Path, new: Path, head: bytes, parts: Sequence[Buffer]) -> bool:
    """Make `new` a link to `old` if that holds exactly these bytes. Returns whether it does."""
    with suppress(OSError, ValueError):
        with old.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as held:
            if held[: len(head)] != head or len(held) != len(head) + sum(part.nbytes for part in parts):
                return False
            if not _are_equal(held, len(head), parts):
                return False
        os.link(old, new)
        return True
    return False


def _are_equal(held: mmap.mmap, offset: int, parts: Sequence[Buffer]) -> bool:
    """Compare with torch: Python would go byte by byte."""
    for part in parts:
        if part.nbytes:
            ours = torch.frombuffer(part, dtype=torch.uint8)
            theirs = torch.frombuffer(memoryview(held), dtype=torch.uint8, count=part.nbytes, offset=offset)
            equal = torch.equal(ours, theirs)
            del ours, theirs  # a view that outlived this would keep the file from being closed
            if not equal:
                return False
            offset += part.nbytes
    return True


def find_file_spans(
    shards: Sequence[SafetensorsShard], heads: Sequence[int], start: int, stop: int
) -> Iterator[tuple[str, int, int]]:
    """Yield where bytes `start` to `stop` of a version lie: file, first byte, number of bytes."""
    for shard, head in zip(shards, heads, strict=True):
        first, end = max(start, shard.start), min(stop, shard.start + shard.size)
        if first < end:
            yield shard.file, head + first - shard.start, end - first
