"""HTTP to one server: calls with deadlines, and streams of events.

Guarantees: whatever goes wrong is one of two errors. `ServerRefusedError`: the server answered, and the answer is no.
`ServerLostError`: there was no whole answer. A stream that is left, by an error or by cancellation, closes its connection,
which is how these servers are told that nobody waits any more. Does not retry and does not know what is asked.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import aiohttp

from headway.errors import EngineError

_MOST_TEXT = 500
"""Characters of a server's answer that an error shows."""
_DONE = b"[DONE]"


class ServerRefusedError(EngineError):
    """An answer that says no; `status` is that of HTTP."""

    def __init__(self, where: str, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"{where}: {status} {text.strip()[:_MOST_TEXT]}")

    @property
    def theirs(self) -> bool:
        """Whether the fault is the server's own and not the request's."""
        return self.status >= 500


class ServerLostError(EngineError):
    """No answer, half an answer, or none in time (`silent`)."""

    def __init__(self, text: str, *, silent: bool = False) -> None:
        self.silent = silent
        super().__init__(text)


class HttpClient:
    """To the server at `url`. Connections are opened when they are needed."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """The answer: JSON where it is that, else text."""
        return await self._asked("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> Any:
        """The answer: JSON where it is that, else text."""
        return await self._asked("POST", path, body, timeout_s)

    async def events(
        self, path: str, body: Mapping[str, Any], *, silence_s: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Server-sent events, each a JSON object, until the server says that it is done."""
        where = f"{self.url}{path}"
        limits = aiohttp.ClientTimeout(total=None, sock_connect=silence_s, sock_read=silence_s)
        try:
            async with self._open().post(where, json=body, timeout=limits) as response:
                await _check(where, response)
                async with aclosing(_records(response.content)) as records:
                    async for record in records:
                        if record == _DONE:
                            return
                        yield _object(where, record)
        except TimeoutError as error:
            raise ServerLostError(f"{where}: nothing for {silence_s:g} s", silent=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLostError(f"{where}: {_told(error)}") from error

    async def close(self) -> None:
        """Let the connections go; the next call opens others. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _asked(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        where = f"{self.url}{path}"
        limits = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._open().request(method, where, json=body, timeout=limits) as response:
                await _check(where, response)
                text = await response.text()
        except TimeoutError as error:
            raise ServerLostError(f"{where}: no answer in {timeout_s:g} s", silent=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLostError(f"{where}: {_told(error)}") from error
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session


async def _check(where: str, response: aiohttp.ClientResponse) -> None:
    if response.status >= 400:
        raise ServerRefusedError(where, response.status, await response.text(errors="replace"))


async def _records(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """The data of each event. Lines may be as long as they like."""
    held = bytearray()
    async for piece in content.iter_any():
        held += piece
        *lines, rest = held.split(b"\n")
        held = bytearray(rest)
        for line in lines:
            if line.startswith(b"data:"):
                yield bytes(line[5:].strip())


def _object(where: str, record: bytes) -> dict[str, Any]:
    try:
        found = json.loads(record)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerLostError(f"{where}: an event that is no JSON object: {record[:80]!r}")
    return found


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
