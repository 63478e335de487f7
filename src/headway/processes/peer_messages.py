"""Calls, answers and notes between two processes.

Messages are framed by their length (8 bytes, little-endian) and encoded by `headway.codec`. A call is
`("call", number, method, arguments)` and may be followed by `("cancel", number)`. It is answered by
`("done", number, value)` or `("fail", number, error)`. A note is `("note", value)`. A call or an answer that arrives
but cannot be decoded becomes `("unread", kind, number, reason)`, so that the waiting caller fails.

An error of `headway.errors` is raised again as what it was; any other becomes `PeerFailed`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, cast

from headway import errors
from headway.codec import Bytes, decode, decode_header, encode
from headway.errors import BackendError, ConfigError, ConfigErrors, HeadwayError
from headway.processes.base import ChildSpec, PeerFailed, PeerLost
from headway.processes.process_output import ProcessOutput

_LENGTH_BYTES = 8


def encode_frame(message: Any, refs: list[Any] | None = None) -> bytes:
    """Encode a message with its length in front. Raises `TypeError` or `ValueError` if it cannot be encoded."""
    data = encode(message, refs)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def split_frames(data: bytes) -> Iterator[memoryview]:
    """Yield every frame of `data`, without its length."""
    view, start = memoryview(data), 0
    while start < len(view):
        begin = start + _LENGTH_BYTES
        start = begin + int.from_bytes(view[start:begin], "little")
        yield view[begin:start]


def deliver_frame(frame: Bytes, on_message: Callable[[Any], None], refs: Sequence[Any] = ()) -> bool:
    """Decode a frame and pass its message on, whatever that raises.

    Returns false if it cannot be decoded and the sender waits for no answer: nothing would tell what is missing.
    """
    try:
        message = decode(frame, refs)
    except Exception as error:
        _report("a message from another process cannot be read", error)
        found = _decode_kind_and_number(frame)
        if found is None:
            return False
        message = ("unread", *found, f"{type(error).__name__}: {error}")
    try:
        on_message(message)
    except Exception as error:
        _report("a message from another process was not understood", error)
    return True


def _decode_kind_and_number(frame: Bytes) -> tuple[str, int] | None:
    """Return kind and number of a call or an answer whose contents cannot be decoded, if these can."""
    try:
        _, kind, number, *_ = decode_header(frame)
    except (ValueError, TypeError):
        return None
    return (kind, number) if kind in ("call", "done", "fail") and type(number) is int else None


def _report(message: str, error: Exception) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})


class MessageProtocol(asyncio.Protocol):
    """One end of a socket that carries whole messages. An error in `on_message` does not break the connection.

    A message that cannot be decoded and that nobody waits for ends the connection.
    """

    def __init__(self, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            end = begin + int.from_bytes(self._buffer[start:begin], "little")
            if end > len(self._buffer):
                break
            if not deliver_frame(self._buffer[begin:end], self._on_message):
                self.abort()
            start = end
        del self._buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def send(self, message: Any) -> None:
        """Send a message without blocking, or drop it after the end. Raises `TypeError` if it cannot be encoded."""
        frame = encode_frame(message)
        if self._transport is not None and not self._transport.is_closing():  # else asyncio prints a warning
            self._transport.write(frame)

    def close(self) -> None:
        """Stop reading and sending; what was written before still leaves."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()


class PendingCalls:
    """The calls to one peer that have no answer yet.

    `send` raises `TypeError` or `ValueError` for a message that cannot be encoded, and never blocks.
    """

    def __init__(self, name: str, send: Callable[[Any], None]) -> None:
        self._name, self._send = name, send
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def call(self, method: str, *args: Any) -> Any:
        """Send a call and wait for its answer. If the caller is cancelled, the peer is told to cancel."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            self._send(("call", number, method, list(args)))
        except (TypeError, ValueError) as error:
            raise PeerFailed(f"{method} cannot be asked of {self._name}: {error}") from error
        self._answers[number] = answer
        try:
            return await answer
        except asyncio.CancelledError:
            self._send(("cancel", number))
            raise
        finally:
            del self._answers[number]

    def take_answer(self, kind: str, *rest: Any) -> None:
        """Give an answer to its caller, if that still waits."""
        if kind == "unread":
            _, number, reason = rest
            value: Any = {"error": "", "message": f"the answer of {self._name} cannot be read: {reason}"}
        else:
            number, value = rest
        answer = self._answers.get(number)
        if answer is None or answer.done():
            return
        if kind == "done":
            answer.set_result(value)
        else:
            answer.set_exception(decode_error(value))

    def fail_all(self, reason: str) -> None:
        """Raise `PeerLost` in every call that waits."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(PeerLost(reason))


class CallingPeer(ABC):
    """The common base of peers in child processes and in actors: calls, notes, and how a peer ends."""

    def __init__(self, spec: ChildSpec, output: ProcessOutput, send: Callable[[Any], None], host: str = "") -> None:
        self.spec = spec
        self.pid = 0
        self.host = host
        self._output = output
        self._calls = PendingCalls(spec.name, send)
        self._on_note: Callable[[Any], None] = lambda note: None
        self._on_end: Callable[[str], None] = lambda how: None
        self._closing = False
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Text that says how the peer ended, once that is known."""

    @abstractmethod
    def kill(self) -> None:
        """End the peer now."""

    @abstractmethod
    async def _wait_for_end(self) -> None:
        """Wait until a killed peer is gone."""

    def subscribe(
        self, *, on_note: Callable[[Any], None] | None = None, on_end: Callable[[str], None] | None = None
    ) -> None:
        self._on_note, self._on_end = on_note or self._on_note, on_end or self._on_end

    async def call(self, method: str, *args: Any) -> Any:
        if self._ended.done():
            raise PeerLost(self._ended.result())
        return await self._calls.call(method, *args)

    async def _bring_up(self, start: Callable[[], Awaitable[object]], timeout_s: float) -> None:
        """Await `start`. If it fails or takes too long, end the peer."""
        try:
            async with asyncio.timeout(timeout_s):
                await start()
        except TimeoutError:
            state = f"{self._describe_start()} after {timeout_s:g} s"
            late = PeerLost(f"{self.spec.name} was not {state}{self._output.read_last_lines()}")
            self.kill()
            await self._wait_for_end()
            raise late from None
        except BaseException:
            self.kill()
            await self._wait_for_end()
            raise

    def _describe_start(self) -> str:
        return "ready"

    def _take_message(self, message: Any) -> None:
        kind, *rest = message
        if kind == "note":
            self._on_note(rest[0])
        else:
            self._calls.take_answer(kind, *rest)

    def _finish(self, process: str, how: str) -> None:
        """The peer is gone. Tell the subscriber first, then every waiting call."""
        text = f"{self.spec.name} ({process}) {how}{self._output.read_last_lines()}"
        self._output.close()
        self._ended.set_result(text)
        self._on_end(text)
        self._calls.fail_all(text)


def encode_error(error: BaseException) -> dict[str, Any]:
    """Describe an error by name and message; one that is not Headway's by its type and text."""
    kind = type(error)
    if getattr(errors, kind.__name__, None) is not kind:
        ours = next((base for base in kind.__mro__ if getattr(errors, base.__name__, None) is base), None)
        known = ours is not None and ours not in (HeadwayError, BackendError)
        name = ours.__name__ if known and ours is not None else ""
        return {"error": name, "message": str(error) if known else f"{kind.__name__}: {error}"}
    found: dict[str, Any] = {"error": kind.__name__, "message": str(error)}
    if isinstance(error, ConfigErrors):
        found["problems"] = [encode_error(problem) for problem in error.problems]
    elif isinstance(error, ConfigError):
        found |= {"key": error.key, "value": _value_or_repr(error.value), "hint": error.hint}
    return found


def decode_error(found: Mapping[str, Any]) -> HeadwayError:
    """Return the error that `encode_error` was given if it is Headway's, else `PeerFailed`."""
    kind = getattr(errors, found["error"], None) if found["error"] else PeerFailed
    if not (isinstance(kind, type) and issubclass(kind, HeadwayError)):
        kind = PeerFailed
    error: HeadwayError = kind.__new__(kind)
    Exception.__init__(error, found["message"])
    if isinstance(error, ConfigError):
        error.key, error.value, error.hint = found.get("key", ""), found.get("value"), found.get("hint", "")
    if isinstance(error, ConfigErrors):
        error.problems = [cast(ConfigError, decode_error(problem)) for problem in found["problems"]]
    return error


def _value_or_repr(value: Any) -> Any:
    try:
        encode(value)
    except (TypeError, ValueError):
        return repr(value)
    return value
