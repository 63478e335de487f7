"""Where a server comes from: an external one, by its address, or one that the run launches.

A launched server ends with this process, however that ended, and writes its output to a log file. When it ends by
itself, its engine is told at once, with the first errors and the last lines of the output. Does not know whether a
server that runs also answers.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from headway.errors import EngineCrashed
from headway.processes.child_process import WatchedProgram, describe_exit
from headway.processes.process_output import open_output_file, read_errors_and_last_lines

_GRACE_S = 5.0

ServerCommand = Callable[[int], tuple[list[str], Mapping[str, str]]]
"""Makes a command line and additions to the environment from a port."""
ReportEnd = Callable[[str], None]
"""Is called with how a server ended, when it did so by itself."""


class ServerHandle:
    """A server at an address. This one is external: it runs already, and is never started or ended here."""

    def __init__(self, url: str) -> None:
        self.url = url
        """Its address. Another one after `start`."""
        self.ended = ""
        """How it ended by itself; empty: it has not, as far as is known."""

    async def wait_for_end(self, timeout_s: float) -> str:
        """Return how it ended, as soon as that is known; empty where it has not after `timeout_s`."""
        return ""

    async def start(self, on_end: ReportEnd) -> None:
        """Start it, or start it again. Does not wait until it answers."""

    async def close(self) -> None:
        """End it, if it was launched here. Idempotent."""


class LaunchedServer(ServerHandle):
    """A program on a free port of this machine. Its output is appended to `log`."""

    def __init__(
        self, name: str, command: ServerCommand, *, log: Path | None = None, grace_s: float = _GRACE_S
    ) -> None:
        super().__init__("")
        self.name = name
        self.pid = 0
        """Process of the watchdog between us and the server."""
        self._command = command
        self._log = log
        self._grace_s = grace_s
        self._program: WatchedProgram | None = None
        self._output: IO[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def wait_for_end(self, timeout_s: float) -> str:
        if self._watch is not None:
            await asyncio.wait([self._watch], timeout=timeout_s)
        return self.ended

    async def start(self, on_end: ReportEnd) -> None:
        await self.close()
        port = _find_free_port()
        command, environment = self._command(port)
        output = self._output = open_output_file(self._log)
        begin = os.fstat(output.fileno()).st_size
        try:
            program = await WatchedProgram.start(
                command,
                env={"PYTHONUNBUFFERED": "1", **environment},
                output=output.fileno(),
                grace_s=self._grace_s / 2,
            )
        except OSError as error:
            raise EngineCrashed(f"{self.name} cannot be started: {error}") from error
        self.url, self.ended, self.pid, self._program = f"http://127.0.0.1:{port}", "", program.pid, program
        self._watch = asyncio.create_task(
            self._watch_program(program, output, begin, on_end), name=f"{self.name}/server"
        )

    async def close(self) -> None:
        watch, self._watch = self._watch, None
        if self._program is not None:
            self._program.end()
        if watch is not None:
            await asyncio.shield(watch)
        output, self._output = self._output, None
        if output is not None:
            output.close()

    async def _watch_program(self, program: WatchedProgram, output: IO[bytes], begin: int, on_end: ReportEnd) -> None:
        code = await program.wait()
        if not program.ending:
            self.ended = f"{self.name}: its server {describe_exit(code)}{read_errors_and_last_lines(output, begin)}"
            on_end(self.ended)


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
