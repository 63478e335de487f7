"""Safetensors files with tensors in the order of a manifest: a stretch of a version is a stretch of a file.

A shard holds whole tensors. Its data are the bytes of the version from the first of them to the last, without gaps:
other programs load it by name, and a bucket is read as one or two ranges of bytes, whatever it cuts in half.

Does not know directories, versions or checksums. `SharedReader` reads the ranges.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from headway.weights.base import TensorEntry
from headway.weights.flat import ALIGNMENT, DTYPES, Buffer, layout_of

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Element types as the format calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of a version."""

    file: str
    tensors: tuple[TensorEntry, ...]
    start: int
    """Byte of the version that its data begin with."""
    size: int
    """Bytes of data."""

    def head(self) -> bytes:
        """What stands before the data: length and JSON, padded so that the data are aligned."""
        fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
        place = 0
        for entry in self.tensors:
            end = place + prod(entry.shape) * DTYPES[entry.dtype].itemsize
            fields[entry.name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [place, end],
            }
            place = end
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def shards_of(entries: Sequence[TensorEntry], shard_bytes: int) -> tuple[Shard, ...]:
    """Whole tensors, in order, in files of about `shard_bytes`; a larger tensor has a file of its own."""
    extents, _ = layout_of(entries)
    groups: list[list[TensorEntry]] = [[]]
    starts, filled = [0], 0
    for extent in extents:
        if groups[-1] and filled + extent.size > shard_bytes:
            groups.append([])
            starts.append(extent.start)
            filled = 0
        groups[-1].append(extent.entry)
        filled += extent.size
    return tuple(
        Shard(
            file=f"model-{number:05d}-of-{len(groups):05d}.safetensors",
            tensors=tuple(group),
            start=start,
            size=layout_of(group)[1],
        )
        for number, (group, start) in enumerate(zip(groups, starts, strict=True), start=1)
    )


def index_of(shards: Sequence[Shard]) -> dict[str, object]:
    """`model.safetensors.index.json`: which file has which tensor."""
    return {
        "metadata": {"total_size": sum(shard.size for shard in shards)},
        "weight_map": {entry.name: shard.file for shard in shards for entry in shard.tensors},
    }


def write_shard(path: Path, head: bytes, parts: Sequence[Buffer]) -> None:
    """The file, from stretches of the version."""
    with path.open("wb", buffering=0) as file:
        for part in (memoryview(head), *parts):
            written = 0
            while written < part.nbytes:
                written += file.write(part[written:])


def link_shard(old: Path, new: Path, head: bytes, parts: Sequence[Buffer]) -> bool:
    """Let `new` be the same file as `old`, if that holds exactly these bytes; whether it does."""
    with suppress(OSError, ValueError):
        with old.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as held:
            if held[: len(head)] != head or len(held) != len(head) + sum(part.nbytes for part in parts):
                return False
            if not _same(held, len(head), parts):
                return False
        os.link(old, new)
        return True
    return False


def _same(held: mmap.mmap, offset: int, parts: Sequence[Buffer]) -> bool:
    """Compared where they lie; Python would go byte by byte."""
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


def spans_of(shards: Sequence[Shard], heads: Sequence[int], start: int, stop: int) -> Iterator[tuple[str, int, int]]:
    """Where bytes `start` to `stop` of a version lie: file, first byte, number of bytes."""
    for shard, head in zip(shards, heads, strict=True):
        first, end = max(start, shard.start), min(stop, shard.start + shard.size)
        if first < end:
            yield shard.file, head + first - shard.start, end - first
