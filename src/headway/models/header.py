"""The head of a GGUF file: what it says about itself, and the names of its tensors. Reads no weights.

A file that is not GGUF, or ends in the middle of its head, raises `NotGguf` with the reason.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError

MAGIC = b"GGUF"
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


class NotGguf(HeadwayError):
    """The file cannot be read as GGUF."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What stands before the weights."""

    metadata: dict[str, Any]
    """By key. Of an array only its length is kept."""
    tensors: frozenset[str]

    @property
    def own_head(self) -> bool:
        """The output layer is a tensor of its own, not the embedding's."""
        return "output.weight" in self.tensors


def read_header(path: Path) -> Header:
    """Of `path`, or `NotGguf`."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise NotGguf("it does not begin with the letters GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _Reader(content).header()
            except (struct.error, KeyError, UnicodeDecodeError, OverflowError, ValueError) as error:
                raise NotGguf("its head is damaged or cut off") from error


class _Reader:
    """A place in the file that moves on."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._place = len(MAGIC)

    def header(self) -> Header:
        version = self._number("I")
        if version not in _VERSIONS:
            raise NotGguf(f"it is version {version} of the format, and {_VERSIONS} can be read")
        tensors, entries = self._number("Q"), self._number("Q")
        metadata = {self._string(): self._value(self._number("I")) for _ in range(entries)}
        return Header(metadata=metadata, tensors=frozenset(self._tensor() for _ in range(tensors)))

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._content, self._place)
        self._place += struct.calcsize(f"<{form}")
        return value

    def _string(self) -> str:
        start = self._skip_string()
        return self._content[start : self._place].decode()

    def _skip_string(self) -> int:
        """Where it began."""
        length = self._number("Q")
        start = self._place
        self._place += length
        if self._place > len(self._content):
            raise ValueError("beyond the end of the file")
        return start

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_FORMATS[kind])
        inner, length = self._number("I"), self._number("Q")
        if inner in _FORMATS:
            self._place += length * struct.calcsize(f"<{_FORMATS[inner]}")
        else:
            for _ in range(length):
                self._skip_string() if inner == _STRING else self._value(inner)
        return length

    def _tensor(self) -> str:
        name = self._string()
        dimensions = self._number("I")
        self._place += 8 * dimensions + 4 + 8
        return name
