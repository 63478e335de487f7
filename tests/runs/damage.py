"""What disks, copies and people do to files."""

from __future__ import annotations

import json
from pathlib import Path

DAMAGES = ("truncated", "zeroed", "flipped", "swapped", "missing")


def apply_damage(path: Path, damage: str, other: Path) -> None:
    """Damage a file; `swapped` exchanges it with `other`."""
    data = path.read_bytes()
    match damage:
        case "truncated":
            path.write_bytes(data[: len(data) * 2 // 3])
        case "zeroed":
            path.write_bytes(bytes(len(data)))
        case "flipped":
            changed = bytearray(data)
            for place in range(len(data) // 3, len(data), max(len(data) // 5, 1)):
                changed[place] ^= 0x55
            path.write_bytes(bytes(changed))
        case "swapped":
            path.write_bytes(other.read_bytes())
            other.write_bytes(data)
        case "missing":
            path.unlink()


def swap_tensors(path: Path) -> None:
    """Exchange the bytes of two tensors of the same size, so that the file looks as before."""
    data = bytearray(path.read_bytes())
    head = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:head])
    places: dict[int, slice] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        place = slice(head + first, head + last)
        mate = places.setdefault(last - first, place)
        if data[mate] != data[place]:
            data[mate], data[place] = data[place], data[mate]
            path.write_bytes(bytes(data))
            return
    raise AssertionError("no two tensors of one size differ")
