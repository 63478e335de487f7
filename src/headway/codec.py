"""Encodes records as bytes: messages between processes, and what the ledger stores.

    header length, 4 bytes | header (UTF-8 JSON) | arrays, in the order in which the header names them

A word of the header is a scalar, or a list that begins with its kind. Numbers in sequences are raw little-endian arrays
behind the header (`i4`, `i8`, `f8`), so that tokens and log-probabilities cost no text.

Guarantees: integers, floats and bytes come back exactly; registered records come back equal; `RepeatedValue` and
`range` stay compact; other sequences come back as tuples and paths as paths. Decoding never executes anything, as
unpickling would. `encode` raises `TypeError` for a value that has no encoding. References to objects in an object store
have none: a transport that carries them beside the bytes passes a list for them (`refs`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from headway import types
from headway.types import RepeatedValue

Bytes = bytes | bytearray | memoryview
_LENGTH_BYTES = 4
_ARRAYS = {"i4": "i", "i8": "q", "f8": "d"}
"""Kinds of arrays and their type codes."""
_SCALARS = frozenset({type(None), bool, int, float, str})
_SHORT = 4
"""Sequences up to this length are cheaper in the header."""
_ENUMS: dict[str, type[StrEnum]] = {"FinishReason": types.FinishReason}
_records: dict[str, type[Any]] = {}
_fields: dict[str, tuple[str, ...]] = {}


def register_records(*classes: type[Any]) -> None:
    """Let instances of these dataclasses be encoded, by the names of their classes."""
    for record in classes:
        _records[record.__name__] = record
        _fields[record.__name__] = tuple(field.name for field in fields(record))


register_records(*(found for found in vars(types).values() if isinstance(found, type) and is_dataclass(found)))


@dataclass(frozen=True, slots=True)
class JsonValue:
    """Marks a value to be encoded as plain JSON. It comes back without the mark, and its lists stay lists."""

    value: Any


def encode(value: Any, refs: list[Any] | None = None) -> bytes:
    """Encode any value of the supported types. References in it are appended to `refs`."""
    blocks = BlockWriter(refs)
    return blocks.join(blocks.put(value))


def decode(data: Bytes, refs: Sequence[Any] = ()) -> Any:
    """Return the value that `encode` was given. `refs` are those that `encode` has appended."""
    header, reader = open_blocks(data, refs)
    return reader.take(header)


def decode_header(data: Bytes) -> Any:
    """Return the header alone, which can be read where the rest cannot."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    return json.loads(bytes(data[_LENGTH_BYTES:end]).decode("utf-8", "surrogatepass"))


def open_blocks(data: Bytes, refs: Sequence[Any] = ()) -> tuple[Any, BlockReader]:
    """Return the header of `data`, and a reader for the arrays behind it."""
    view = memoryview(data)
    end = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
    return decode_header(view), BlockReader(view, end, refs)


class BlockWriter:
    """Collects the arrays that follow a header, while the header's words are made."""

    __slots__ = ("_blocks", "_refs")

    def __init__(self, refs: list[Any] | None = None) -> None:
        self._blocks: list[bytes] = []
        self._refs = refs

    def join(self, header: Any) -> bytes:
        """Return the header and all arrays. Raises `TypeError` or `ValueError` if the header is not JSON."""
        # Text may end with half a character, where a length limit has cut it off.
        encoded = _JSON.encode(header).encode("utf-8", "surrogatepass")
        return b"".join((len(encoded).to_bytes(_LENGTH_BYTES, "little"), encoded, *self._blocks))

    def put_bytes(self, data: bytes) -> int:
        """Add raw bytes and return their number."""
        self._blocks.append(data)
        return len(data)

    def put_array(self, values: Iterable[Any], kinds: Sequence[str]) -> str:
        """Add numbers as the first of these kinds that can hold all of them, and return it; empty if none can."""
        for kind in kinds:
            try:
                self._blocks.append(array(_ARRAYS[kind], values).tobytes())
            except (OverflowError, TypeError):
                continue
            return kind
        return ""

    def put(self, value: Any) -> Any:
        """Return the header's word for `value`, whose arrays are added. Raises `TypeError` if it has no encoding."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        name = kind.__name__
        if _records.get(name) is kind:
            return [name, *(self.put(getattr(value, field)) for field in _fields[name])]
        if isinstance(value, Mapping):
            return ["d", {_check_key(key): self.put(item) for key, item in value.items()}]
        if kind in (list, tuple):
            return self._put_sequence(value)
        compact = put_compact(value)
        if compact is not None:
            return compact
        if kind is JsonValue:
            return ["j", value.value]
        if isinstance(value, StrEnum) and name in _ENUMS:
            return ["e", name, value.value]
        if isinstance(value, Path):
            return ["p", str(value)]
        if kind is bytes:
            return ["b", self.put_bytes(value)]
        if name == "ObjectRef" and self._refs is not None:
            self._refs.append(value)
            return ["o", len(self._refs) - 1]
        if hasattr(value, "tolist"):  # numpy, torch, array
            return self.put(value.tolist())
        raise TypeError(f"{name} has no form between processes: {value!r:.80}")

    def _put_sequence(self, values: Sequence[Any]) -> list[Any]:
        kinds = set(map(type, values)) if len(values) > _SHORT else set()
        if len(kinds) == 1 and (float in kinds or int in kinds):
            kind = self.put_array(values, ("f8",) if float in kinds else ("i4", "i8"))
            if kind:
                return [kind, len(values)]
        return ["l", *map(self.put, values)]


class BlockReader:
    """Takes values out of encoded bytes, in the order in which they were put in."""

    __slots__ = ("_data", "_offset", "_refs")

    def __init__(self, data: memoryview, offset: int, refs: Sequence[Any] = ()) -> None:
        self._data, self._offset, self._refs = data, offset, refs

    def take(self, word: Any) -> Any:
        """Return the value of a word of the header. Raises `TypeError` or `ValueError` if it cannot be decoded."""
        if not isinstance(word, list):
            return word
        kind = word[0]
        if kind in _fields:
            named = zip(_fields[kind], word[1:], strict=True)
            return _records[kind](**{name: self.take(item) for name, item in named})
        if kind == "l":
            return tuple([self.take(item) for item in word[1:]])
        if kind in _ARRAYS:
            return self.take_array(kind, word[1])
        if kind == "d":
            return {key: self.take(item) for key, item in word[1].items()}
        if kind == "r":
            return RepeatedValue(word[1], word[2])
        if kind == "s":
            return range(*word[1:])
        if kind == "j":
            return word[1]
        if kind == "e":
            return _ENUMS[word[1]](word[2])
        if kind == "p":
            return Path(word[1])
        if kind == "b":
            return self.take_bytes(word[1])
        if kind == "o":
            return self._refs[word[1]]
        raise TypeError(f"a message holds {kind!r}, which nothing reads")

    def take_array(self, kind: str, length: int) -> tuple[Any, ...]:
        """Return the next `length` numbers."""
        found = array(_ARRAYS[kind])
        found.frombytes(self._take(length * found.itemsize))
        return tuple(found)

    def take_bytes(self, length: int) -> bytes:
        """Return the next `length` bytes."""
        return bytes(self._take(length))

    def _take(self, size: int) -> memoryview:
        end = self._offset + size
        if end > len(self._data):
            raise ValueError(f"{len(self._data)} bytes are cut short: {end - len(self._data)} are missing")
        found, self._offset = self._data[self._offset : end], end
        return found


def put_compact(value: Any) -> list[Any] | None:
    """Return the word for a sequence that needs no array, or `None` for any other value."""
    if isinstance(value, RepeatedValue):
        return ["r", value.value, value.length]
    if isinstance(value, range):
        return ["s", value.start, value.stop, value.step]
    return None


def _check_key(key: Any) -> str:
    if type(key) is not str:
        raise TypeError(f"{key!r} is no key: between processes these are text")
    return key


def _to_plain(value: object) -> object:
    """Return what JSON has for read-only mappings and numpy values."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r}")


_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False, default=_to_plain)
