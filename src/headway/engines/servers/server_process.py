"""Where a server comes from: somebody else's, by its address, or one of our own.

A server of ours is a process group with a watchdog that ends it with us, however we ended, and writes its output to a
log file. When it ends by itself, whoever owns it is told at once, with its last lines. Does not know whether a
server that runs also answers.

A server of several processes ends with the words of the first, which only says that another has failed: the first
errors in its output are told too.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Protocol

from headway.errors import EngineCrashed
from headway.processes.child_process import WatchedProgram
from headway.processes.process_output import open_output_file, read_errors_and_last_lines

_GRACE_S = 5.0

ServerCommand = Callable[[int], tuple[list[str], Mapping[str, str]]]
"""From a port to a command line and additions to the environment."""


class ServerHandle(Protocol):
    """Something at an address."""

    on_end: Callable[[str], None]
    """Called with how it ended, when it did so by itself."""

    @property
    def url(self) -> str:
        """Where it is. Another one after `start`."""
        ...

    @property
    def ended(self) -> str:
        """How it ended by itself; empty: it has not, as far as anybody knows."""
        ...

    async def ending(self, within_s: float) -> str:
        """How it ended, as soon as that is known; empty where it has not after `within_s`."""
        ...

    async def start(self) -> None:
        """Begin, anew where it was there before. Does not wait until it answers."""
        ...

    async def close(self) -> None:
        """End it, if it is ours. Idempotent."""
        ...


class ExternalServer:
    """A `ServerHandle` of somebody else: never started, never ended."""

    ended = ""

    def __init__(self, url: str) -> None:
        self.url = url
        self.on_end: Callable[[str], None] = lambda how: None

    async def ending(self, within_s: float) -> str:
        """Nobody tells."""
        return ""

    async def start(self) -> None:
        """Whoever owns it has done so."""

    async def close(self) -> None:
        """It stays."""


class LaunchedServer:
    """A `ServerHandle` of our own on a free port of this machine. `log`: its output is appended there."""

    def __init__(
        self, name: str, command: ServerCommand, *, log: Path | None = None, grace_s: float = _GRACE_S
    ) -> None:
        self.name = name
        self.url = ""
        self.ended = ""
        self.on_end: Callable[[str], None] = lambda how: None
        self.pid = 0
        """Process of the watchdog."""
        self._command = command
        self._log = log
        self._grace_s = grace_s
        self._program: WatchedProgram | None = None
        self._output: IO[bytes] | None = None
        self._begin = 0
        """Where in its output this life of it begins."""
        self._watch: asyncio.Task[None] | None = None

    async def ending(self, within_s: float) -> str:
        if self._watch is not None:
            await asyncio.wait([self._watch], timeout=within_s)
        return self.ended

    async def start(self) -> None:
        await self.close()
        port = _free_port()
        line, environment = self._command(port)
        output = self._output = open_output_file(self._log)
        self._begin = os.fstat(output.fileno()).st_size
        environment = {"PYTHONUNBUFFERED": "1", **environment}
        try:
            program = await WatchedProgram.start(
                line, env=environment, output=output.fileno(), grace_s=self._grace_s / 2
            )
        except OSError as error:
            raise EngineCrashed(f"{self.name} cannot be started: {error}") from error
        self.url, self.ended, self.pid, self._program = f"http://127.0.0.1:{port}", "", program.pid, program
        self._watch = asyncio.create_task(self._watch_program(program), name=f"{self.name}/server")

    async def close(self) -> None:
        watch, self._watch = self._watch, None
        if self._program is not None:
            self._program.end()
        if watch is not None:
            await asyncio.shield(watch)
        output, self._output = self._output, None
        if output is not None:
            output.close()

    async def _watch_program(self, program: WatchedProgram) -> None:
        code = await program.wait()
        if not program.ending:
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            self.ended = f"{self.name}: its server ended with {how}{self.last_lines()}"
            self.on_end(self.ended)

    def last_lines(self) -> str:
        """Of its output, for people, and the first errors in it."""
        return "" if self._output is None else read_errors_and_last_lines(self._output, self._begin)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
