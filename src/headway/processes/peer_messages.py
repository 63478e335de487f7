"""Records between processes: calls, answers and notes as frames of bytes.

    length, 8 bytes | header length, 4 bytes | header (UTF-8 JSON) | arrays, in the order the header names them

Guarantees: the records in `RECORDS` come back equal, integers, floats and bytes exactly, `Repeated` and `range`
compact; an error of `headway.errors` comes back as what it was; nothing is executed on reading, as it would be with
pickle. Other sequences come back as tuples, paths as paths. What has no form here is refused by whoever sends it:
`TypeError`. References to stored objects have none either: whoever can carry them beside the frame gives a list for
them (`refs`).
"""

from __future__ import annotations

import asyncio
import json
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, cast

from headway import errors, types
from headway.cluster.base import PeerFailed, PeerLost
from headway.engines.base import Request
from headway.errors import BackendError, ConfigError, ConfigErrors, HeadwayError
from headway.weights.base import (
    Bucket,
    FileSlice,
    IpcSlice,
    Manifest,
    ObjectSlice,
    ReceivedBuffer,
    SharedSlice,
    TensorEntry,
    UnchangedBucket,
)

RECORDS: dict[str, type[Any]] = {
    one.__name__: one
    for one in (
        *(one for one in vars(types).values() if isinstance(one, type) and is_dataclass(one)),
        *(
            Request,
            Manifest,
            TensorEntry,
            Bucket,
            SharedSlice,
            FileSlice,
            ObjectSlice,
            IpcSlice,
            ReceivedBuffer,
            UnchangedBucket,
        ),
    )
}
_ENUMS: dict[str, type[StrEnum]] = {"FinishReason": types.FinishReason}
_FIELDS = {name: tuple(field.name for field in fields(one)) for name, one in RECORDS.items()}
_FRAME = struct.Struct("<QI")
_SHORT = 4
"""Sequences up to this length are cheaper in the header."""


class _Blocks(list[bytes]):
    """What follows the header, and what travels beside it."""

    __slots__ = ("refs",)

    def __init__(self, refs: list[Any] | None) -> None:
        super().__init__()
        self.refs = refs


def encode_message(value: Any, refs: list[Any] | None = None) -> bytes:
    """`value` as one frame; references in it are appended to `refs`, and must be there when it is read."""
    blocks = _Blocks(refs)
    header = _JSON.encode(_put(value, blocks)).encode("utf-8", "surrogatepass")
    body = sum(map(len, blocks))
    return b"".join((_FRAME.pack(4 + len(header) + body, len(header)), header, *blocks))


def decode_message(frame: bytes | bytearray | memoryview, refs: Sequence[Any] = ()) -> Any:
    """What `encode_message` was given; `frame` without its length."""
    view = memoryview(frame)
    end = 4 + int.from_bytes(view[:4], "little")
    header = json.loads(bytes(view[4:end]).decode("utf-8", "surrogatepass"))
    return _Reader(view, end, refs).take(header)


def split_frames(data: bytes) -> Iterator[memoryview]:
    """Each of several frames that were joined, without its length."""
    view, at = memoryview(data), 0
    while at < len(view):
        end = at + 8 + int.from_bytes(view[at : at + 8], "little")
        yield view[at + 8 : end]
        at = end


def _put(value: Any, blocks: _Blocks) -> Any:
    """The header's word for `value`: a scalar, or a list that begins with its kind."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    name = kind.__name__
    if RECORDS.get(name) is kind:
        return [name, *(_put(getattr(value, field), blocks) for field in _FIELDS[name])]
    if isinstance(value, Mapping):
        return ["d", {_key(key): _put(one, blocks) for key, one in value.items()}]
    if kind in (list, tuple):
        return _put_sequence(value, blocks)
    if isinstance(value, types.RepeatedValue):
        return ["r", value.value, value.length]
    if kind is range:
        return ["s", value.start, value.stop, value.step]
    if isinstance(value, StrEnum) and name in _ENUMS:
        return ["e", name, value.value]
    if isinstance(value, Path):
        return ["p", str(value)]
    if kind is bytes:
        blocks.append(value)
        return ["b", len(value)]
    if name == "ObjectRef" and blocks.refs is not None:
        blocks.refs.append(value)
        return ["o", len(blocks.refs) - 1]
    if hasattr(value, "tolist"):  # numpy, torch, array
        return _put(value.tolist(), blocks)
    raise TypeError(f"{name} has no form between processes: {value!r:.80}")


def _put_sequence(values: Sequence[Any], blocks: _Blocks) -> list[Any]:
    kinds = set(map(type, values)) if len(values) > _SHORT else set()
    if kinds == {float}:
        blocks.append(array("d", values).tobytes())
        return ["f8", len(values)]
    if kinds == {int}:
        for code, name in (("i", "i4"), ("q", "i8")):
            try:
                blocks.append(array(code, values).tobytes())
            except OverflowError:
                continue
            return [name, len(values)]
    return ["l", *(_put(one, blocks) for one in values)]


def _key(key: Any) -> str:
    if type(key) is not str:
        raise TypeError(f"{key!r} is no key: between processes these are text")
    return key


class _Reader:
    """Takes values out of a frame in the order they were put in."""

    __slots__ = ("_at", "_refs", "_view")

    def __init__(self, view: memoryview, at: int, refs: Sequence[Any]) -> None:
        self._view = view
        self._at = at
        self._refs = refs

    def take(self, word: Any) -> Any:
        if not isinstance(word, list):
            return word
        kind = word[0]
        if kind in _FIELDS:
            named = zip(_FIELDS[kind], word[1:], strict=True)
            return RECORDS[kind](**{name: self.take(one) for name, one in named})
        if kind == "l":
            return tuple([self.take(one) for one in word[1:]])
        if kind in _ARRAYS:
            return self._array(_ARRAYS[kind], word[1])
        if kind == "d":
            return {key: self.take(one) for key, one in word[1].items()}
        if kind == "r":
            return types.RepeatedValue(word[1], word[2])
        if kind == "s":
            return range(*word[1:])
        if kind == "e":
            return _ENUMS[word[1]](word[2])
        if kind == "p":
            return Path(word[1])
        if kind == "b":
            self._at += word[1]
            return bytes(self._view[self._at - word[1] : self._at])
        if kind == "o":
            return self._refs[word[1]]
        raise TypeError(f"a frame holds {kind!r}, which nothing reads")

    def _array(self, code: str, length: int) -> tuple[Any, ...]:
        found = array(code)
        end = self._at + length * found.itemsize
        found.frombytes(self._view[self._at : end])
        self._at = end
        return tuple(found)


_SCALARS = frozenset({type(None), bool, int, float, str})
_ARRAYS = {"i4": "i", "i8": "q", "f8": "d"}
_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False)


def _numbered(frame: bytes | bytearray | memoryview) -> tuple[str, int] | None:
    """Kind and number of a call or an answer whose contents cannot be read; none where not even these can."""
    try:
        end = 4 + int.from_bytes(frame[:4], "little")
        _, kind, number, *_ = json.loads(bytes(frame[4:end]).decode("utf-8", "surrogatepass"))
    except (ValueError, TypeError):
        return None
    return (kind, number) if kind in ("call", "done", "fail") and type(number) is int else None


# -- errors


def encode_error(error: BaseException) -> dict[str, Any]:
    """By name and message; one that is not ours by its type and text."""
    kind = type(error)
    if getattr(errors, kind.__name__, None) is not kind:
        ours = next((one for one in kind.__mro__ if getattr(errors, one.__name__, None) is one), None)
        known = ours is not None and ours not in (HeadwayError, BackendError)
        name = ours.__name__ if known and ours is not None else ""
        return {"error": name, "message": str(error) if known else f"{kind.__name__}: {error}"}
    found: dict[str, Any] = {"error": kind.__name__, "message": str(error)}
    if isinstance(error, ConfigErrors):
        found["problems"] = [encode_error(one) for one in error.problems]
    elif isinstance(error, ConfigError):
        found |= {"key": error.key, "value": _plain(error.value), "hint": error.hint}
    return found


def decode_error(found: Mapping[str, Any]) -> HeadwayError:
    """What `encode_error` was given, as far as it is ours; `PeerFailed` otherwise."""
    kind = getattr(errors, found["error"], None) if found["error"] else PeerFailed
    if not (isinstance(kind, type) and issubclass(kind, HeadwayError)):
        kind = PeerFailed
    error: HeadwayError = kind.__new__(kind)
    Exception.__init__(error, found["message"])
    if isinstance(error, ConfigError):
        error.key, error.value, error.hint = found.get("key", ""), found.get("value"), found.get("hint", "")
    if isinstance(error, ConfigErrors):
        error.problems = [cast(ConfigError, decode_error(one)) for one in found["problems"]]
    return error


def _plain(value: Any) -> Any:
    try:
        encode_message(value)
    except (TypeError, ValueError):
        return repr(value)
    return value


# -- the way


def deliver_frame(frame: bytearray | memoryview, on_message: Callable[[Any], None], refs: Sequence[Any] = ()) -> bool:
    """Hand a frame's message over, whatever that raises; false where it cannot be read and nobody can be told."""
    try:
        message = decode_message(frame, refs)
    except Exception as error:
        _report("a message from another process cannot be read", error)
        found = _numbered(frame)
        if found is None:
            return False
        message = ("unread", *found, f"{type(error).__name__}: {error}")
    try:
        on_message(message)
    except Exception as error:
        _report("a message from another process was not understood", error)
    return True


def _report(message: str, error: Exception) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})


class MessageProtocol(asyncio.Protocol):
    """One end of a socket: whole messages in, whole messages out. Nothing that `on_message` raises breaks it.

    Of a call or an answer that cannot be read, `on_message` gets `("unread", kind, number, why)`, so that whoever waits
    for it is told. Anything else that cannot be read ends the connection: nobody would know what is missing.
    """

    def __init__(self, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= 8:
            end = at + 8 + int.from_bytes(self._buffer[at : at + 8], "little")
            if end > len(self._buffer):
                break
            self._deliver(self._buffer[at + 8 : end])
            at = end
        del self._buffer[:at]

    def _deliver(self, frame: bytearray) -> None:
        if not deliver_frame(frame, self._on_message) and self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def send(self, message: Any) -> None:
        """Never blocks; after the end nothing is sent. Raises `TypeError` for what cannot travel."""
        frame = encode_message(message)
        if self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        """No more is read or sent; what was written still leaves."""
        if self._transport is not None:
            self._transport.close()


class PendingCalls:
    """Of one peer. `send` raises `TypeError` or `ValueError` for what cannot travel, and never blocks."""

    def __init__(self, name: str, send: Callable[[Any], None]) -> None:
        self._name, self._send = name, send
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def call(self, method: str, *args: Any) -> Any:
        """What is answered. Cancelled here, the other side is told."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            self._send(("call", number, method, list(args)))
        except (TypeError, ValueError) as error:
            raise PeerFailed(f"{method} cannot be asked of {self._name}: {error}") from error
        self._waiting[number] = answer
        try:
            return await answer
        except asyncio.CancelledError:
            self._send(("cancel", number))
            raise
        finally:
            del self._waiting[number]

    def answered(self, kind: str, *rest: Any) -> None:
        """By one of the messages above; nothing where nobody waits any more."""
        if kind == "unread":
            _, number, why = rest
            value: Any = {"error": "", "message": f"the answer of {self._name} cannot be read: {why}"}
        else:
            number, value = rest
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return
        if kind == "done":
            answer.set_result(value)
        else:
            answer.set_exception(decode_error(value))

    def lose(self, how: str) -> None:
        """Whoever waits gets `PeerLost`."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(PeerLost(how))
