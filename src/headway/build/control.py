"""Speaking to a run that is at work: a socket in its directory, a line of JSON each way.

    {"engines": 3}  →  {"joined": ["engine/1", "engine/2"], "left": []}   or   {"error": "engines = 0: …"}

Guarantees: only the owner of the run may connect (the socket is made with mode 600); what is asked wrongly is answered
with what is wrong, and never disturbs the run. The socket goes with the run; one that a killed run left behind is
replaced by the next, and refuses everybody until then.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, HeadwayError
from headway.flow.flow import AsyncTrainingFlow

SOCKET = "control.sock"
_MOST_BYTES = 4096
_PATIENCE_S = 10.0

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@asynccontextmanager
async def listening(directory: Path, answer: Answer) -> AsyncIterator[None]:
    """Answer whoever asks, as long as the block lasts. Raises `OSError` where there can be no socket."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, TimeoutError, ValueError):
                async with asyncio.timeout(_PATIENCE_S):
                    reply = _answered(await reader.readline(), answer)
                    writer.write(json.dumps(reply).encode() + b"\n")
                    await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, sock=_bound(directory), limit=_MOST_BYTES)
    try:
        yield
    finally:
        server.close()
        (directory / SOCKET).unlink(missing_ok=True)


def scaling(flow: AsyncTrainingFlow) -> Answer:
    """What a run says to `{"engines": n}`."""

    def answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
        wanted = question.get("engines")
        if not isinstance(wanted, int) or isinstance(wanted, bool):
            raise ConfigError("how many?", key="engines", value=wanted, hint="a whole number")
        if flow.fleet is None:
            raise HeadwayError("the run is still starting: try again in a moment")
        joined, left = flow.fleet.scale(wanted)
        return {"joined": joined, "left": left}

    return answer


def ask(directory: Path, question: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the run in `directory` says. Raises `HeadwayError` where none is at work there, or where it refuses."""
    if not directory.is_dir():
        raise HeadwayError(f"{directory}: there is no such directory")
    try:
        with socket.socket(socket.AF_UNIX) as connection, _address(directory) as address:
            connection.settimeout(_PATIENCE_S)
            connection.connect(address)
            connection.sendall(json.dumps(question).encode() + b"\n")
            reply = json.loads(connection.makefile("rb").readline(_MOST_BYTES) or b"{}")
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


def _answered(line: bytes, answer: Answer) -> Mapping[str, Any]:
    try:
        question = json.loads(line)
        if not isinstance(question, dict):
            raise ValueError("not an object")
        return answer(question)
    except ValueError as error:
        return {"error": f"not understood: {error}"}
    except HeadwayError as error:
        return {"error": str(error)}


def _bound(directory: Path) -> socket.socket:
    """The listening end; nobody else may use it from the moment that it is there."""
    (directory / SOCKET).unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(made.fileno(), 0o600)
        with _address(directory) as address:
            made.bind(address)
        (directory / SOCKET).chmod(0o600)
    except BaseException:
        made.close()
        raise
    return made


@contextmanager
def _address(directory: Path) -> Iterator[str]:
    """A name for the socket that is short enough: those of sockets end after some hundred characters."""
    own = Path("/proc/self/fd")
    if not own.is_dir():
        yield str(directory / SOCKET)
        return
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield str(own / str(handle) / SOCKET)
    finally:
        os.close(handle)
