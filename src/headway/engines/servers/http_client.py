"""HTTP to one server: calls with deadlines, and streams of events.

Guarantees: whatever goes wrong is one of two errors. `ServerRefused`: the server answered, and the answer is no.
`BackendLost`: there was no whole answer. A stream that is left, by an error or by cancellation, closes its connection,
which tells these servers to stop the request. `close` ends whatever waits for an answer. Does not retry and does not
know what the calls mean.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import aiohttp

from headway.engines.streaming_engine import BackendLost, StreamError

_MOST_TEXT = 500
"""Characters of a server's answer that an error shows."""
_DONE = b"[DONE]"
_IDLE_S = 2.0
"""Seconds after which an idle connection is not used again. These servers close theirs after five, and a request that
meets such a close is lost."""


class ServerRefused(StreamError):
    """An answer that says no. An HTTP `status` of 500 or more is the server's own fault, others are the request's."""

    def __init__(self, where: str, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"{where}: {status} {text.strip()[:_MOST_TEXT]}")


@contextmanager
def name_phase(phase: str) -> Iterator[None]:
    """Name the phase of an update in the error of a call that fails inside."""
    try:
        yield
    except StreamError as error:
        raise BackendLost(f"{phase}: {error}", silent=getattr(error, "silent", False)) from error


class HttpClient:
    """The connection to the server at `url`, opened when it is needed, until it is closed."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.closed = False
        self._session: aiohttp.ClientSession | None = None
        self._responses: set[aiohttp.ClientResponse] = set()
        """Responses that are being read."""

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """Return the answer: parsed where it is JSON, else its text."""
        return await self._call("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> Any:
        """Return the answer: parsed where it is JSON, else its text."""
        return await self._call("POST", path, body, timeout_s)

    async def stream(
        self, path: str, body: Mapping[str, Any], *, silence_s: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield server-sent events, each a JSON object, until the server says that it is done."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=silence_s, sock_read=silence_s)
        async with (
            self._request("POST", path, body, limits, f"nothing for {silence_s:g} s") as response,
            aclosing(_read_events(response.content)) as events,
        ):
            async for event in events:
                if event == _DONE:
                    return
                yield _parse_event(f"{self.url}{path}", event)

    async def close(self) -> None:
        """Close the connections. Calls and streams under way are lost at once, and so are later ones. Idempotent."""
        self.closed = True
        session, self._session = self._session, None
        for response in self._responses:
            response.close()  # a session drops its responses without waking those who read them
        if session is not None:
            await session.close()

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        limits = aiohttp.ClientTimeout(total=timeout_s)
        async with self._request(method, path, body, limits, f"no answer in {timeout_s:g} s") as response:
            text = await response.text()
        try:
            return json.loads(text)
        except ValueError:
            return text

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, limits: aiohttp.ClientTimeout, late: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a response. Raises `ServerRefused` for one that is an error, `BackendLost` where it breaks off."""
        where = f"{self.url}{path}"
        if self.closed:
            raise BackendLost(f"{where}: the client is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S))
        try:
            async with self._session.request(method, where, json=body, timeout=limits) as response:
                self._responses.add(response)
                try:
                    if response.status >= 400:
                        raise ServerRefused(where, response.status, await response.text(errors="replace"))
                    yield response
                finally:
                    self._responses.discard(response)
        except TimeoutError as error:
            raise BackendLost(f"{where}: {late}", silent=True) from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: `close` came in between
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise BackendLost(f"{where}: {text}") from error


async def _read_events(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield the data of each event. Lines may have any length."""
    buffer = bytearray()
    async for received in content.iter_any():
        buffer += received
        *lines, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        for line in lines:
            if line.startswith(b"data:"):
                yield bytes(line[5:].strip())


def _parse_event(where: str, event: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(event)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise BackendLost(f"{where}: an event that is no JSON object: {event[:80]!r}")
    return parsed
