"""A socket in the directory of a run at work, for requests from other processes: a line of JSON each way.

    {"status": true} →  {"phase": "training", …}
    {"engines": 3}  →  {"joined": ["engine/1", "engine/2"], "left": []}   or   {"error": "engines = 0: …"}

Guarantees: only the owner of the run may connect (the socket has mode 600). A wrong request is answered with what is
wrong, and never disturbs the run. The socket goes with the run; one that a killed run left behind refuses all requests
until the next run replaces it.
"""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError

CONTROL_SOCKET = "control.sock"
_MAX_REQUEST_BYTES = 4096
_MAX_REPLY_BYTES = 1 << 22
_REPLY_TIMEOUT_S = 10.0

ControlHandler = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Function from a request to its reply; a `HeadwayError` becomes an error reply."""


@asynccontextmanager
async def serve_control_socket(directory: Path, handler: ControlHandler) -> AsyncIterator[None]:
    """Answer requests until the block ends. Raises `OSError` where no socket can be made."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, TimeoutError, ValueError):
                async with asyncio.timeout(_REPLY_TIMEOUT_S):
                    reply = _handle_request(await reader.readline(), handler)
                    writer.write(json.dumps(reply).encode() + b"\n")
                    await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, sock=_bind_socket(directory), limit=_MAX_REQUEST_BYTES)
    try:
        yield
    finally:
        server.close()
        (directory / CONTROL_SOCKET).unlink(missing_ok=True)


def send_control_request(
    directory: Path, request: Mapping[str, Any], *, timeout_s: float = _REPLY_TIMEOUT_S
) -> Mapping[str, Any]:
    """Return the reply of the run in `directory`. Raises `HeadwayError` where none is running, or where it refuses."""
    if not directory.is_dir():
        raise HeadwayError(f"{directory}: there is no such directory")
    try:
        with socket.socket(socket.AF_UNIX) as connection, _shorten_socket_path(directory) as address:
            connection.settimeout(timeout_s)
            connection.connect(address)
            connection.sendall(json.dumps(request).encode() + b"\n")
            reply = json.loads(connection.makefile("rb").readline(_MAX_REPLY_BYTES) or b"{}")
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise HeadwayError(f"{directory}: no run is at work there") from error
    except TimeoutError as error:
        raise HeadwayError(f"{directory}: the run does not answer") from error
    except PermissionError as error:
        raise HeadwayError(f"{directory}: the run belongs to somebody else") from error
    except (OSError, ValueError) as error:
        raise HeadwayError(f"{directory}: the run was lost while it was asked: {error}") from error
    if "error" in reply or not reply:
        raise HeadwayError(str(reply.get("error", f"{directory}: the run ended while it was asked")))
    return dict(reply)


def _handle_request(line: bytes, handler: ControlHandler) -> Mapping[str, Any]:
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise ValueError("not an object")
        return handler(request)
    except ValueError as error:
        return {"error": f"not understood: {error}"}
    except HeadwayError as error:
        return {"error": str(error)}


def _bind_socket(directory: Path) -> socket.socket:
    """Make the listening socket, which only its owner may use from the moment that it exists."""
    (directory / CONTROL_SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(listener.fileno(), 0o600)
        with _shorten_socket_path(directory) as address:
            listener.bind(address)
        (directory / CONTROL_SOCKET).chmod(0o600)
    except BaseException:
        listener.close()
        raise
    return listener


@contextmanager
def _shorten_socket_path(directory: Path) -> Iterator[str]:
    """Yield a path to the socket that stays below the limit of about a hundred characters."""
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        yield str(directory / CONTROL_SOCKET)
        return
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield str(descriptors / str(handle) / CONTROL_SOCKET)
    finally:
        os.close(handle)
