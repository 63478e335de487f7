"""A safetensors file that many ranks write at once, each its own shards at their places.

All ranks compute the same layout from the names, shapes and types of all tensors. Rank 0 writes the header and makes
the file as long as it will be; then every rank writes its shards, one tensor at a time, so that no rank holds more than
one of them in host memory and nothing is written twice. The ranks need one file system.

Guarantees: every byte is written by exactly one rank, the first that has it. What a rank wrote is on the disk when
`write_shards` returns. Does not wait for other ranks: callers do, between the two functions and after the second.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.int8: "I8", torch.bool: "BOOL"}


def begin_file(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write the header of a file, and give it the length that it will have."""
    header, starts = _lay_out(tensors)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(starts[""])


def write_shards(tensors: Mapping[str, Tensor], path: Path, *, is_first: bool) -> None:
    """Write what this rank has of each tensor; rank 0 (`is_first`) has those that are not sharded."""
    _, starts = _lay_out(tensors)
    handle = os.open(path, os.O_WRONLY)
    try:
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                if _is_first_holder(tensor):
                    _write_shard(handle, starts[name], tensor)
            elif is_first:
                _write_at(handle, starts[name], _read_bytes(tensor))
        os.fsync(handle)
    finally:
        os.close(handle)


def _lay_out(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the header, and where each tensor starts in the file; the empty name stands for the end."""
    entries: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}  # as `transformers` wants it
    starts, end = {}, 0
    for name in sorted(tensors, key=lambda each: (-tensors[each].element_size(), each)):  # keeps them aligned
        tensor = tensors[name]
        starts[name], end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [starts[name], end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return header, {name: 8 + len(header) + start for name, start in (starts | {"": end}).items()}


def _is_first_holder(tensor: DTensor) -> bool:
    """Return whether no earlier rank has the same shard."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    places = zip(coordinate, tensor.placements, strict=True)
    return all(not isinstance(placement, Replicate) or index == 0 for index, placement in places)


def _write_shard(handle: int, start: int, tensor: DTensor) -> None:
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if not math.prod(shape):
        return
    data, size = _read_bytes(tensor.to_local()), tensor.element_size()
    length, places = _find_runs(tensor.shape, shape, offset)
    for number, place in enumerate(places):
        _write_at(handle, start + place * size, data[number * length * size : (number + 1) * length * size])


def _find_runs(whole: Sequence[int], shape: Sequence[int], offset: Sequence[int]) -> tuple[int, Iterator[int]]:
    """Return how many elements of a shard lie together in the whole tensor, and where each such run starts there."""
    last = len(whole)  # dimensions from here on are complete
    while last and shape[last - 1] == whole[last - 1]:
        last -= 1
    strides = [math.prod(whole[dimension + 1 :]) for dimension in range(len(whole))]
    first = sum(index * stride for index, stride in zip(offset, strides, strict=True))
    outer = [range(0, shape[dimension] * strides[dimension], strides[dimension]) for dimension in range(last - 1)]
    return math.prod(shape[max(last - 1, 0) :]), (first + sum(steps) for steps in product(*outer))


def _read_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _write_at(handle: int, place: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(handle, data, place)
        data, place = data[written:], place + written
