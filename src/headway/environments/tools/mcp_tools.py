"""Tools of MCP servers, reached over stdio or HTTP with the official client.

The server is a program that the user names and trusts, or runs already behind a URL. A program is started for each
episode, so that no episode sees what another left in it, or once per environment with `keep`. It ends with `close`, and
when this process is gone, because its standard input then closes. An error that a tool returns is a refusal that the
policy reads. A server that dies, or is silent for `timeout_s`, loses the episode. Only the text of an answer is passed
on; other parts are named by type.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from headway.environments.tools.base import Tool, ToolArguments, ToolRefused
from headway.errors import ConfigError, EnvironmentFailed
from headway.extras import import_optional

_INVALID_PARAMETERS = -32602


class MCPToolSource:
    """Provides the tools of one server."""

    def __init__(
        self,
        *,
        command: str = "",
        url: str = "",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 30.0,
        keep: bool = False,
        only: Sequence[str] = (),
    ) -> None:
        self._mcp = import_optional("mcp", extra="mcp", key="env_type", value="mcp")
        if bool(command) == bool(url):
            raise ConfigError("must name a program, or url a server", key="command", value=command or None)
        if timeout_s <= 0:
            raise ConfigError("must be more than 0", key="timeout_s", value=timeout_s)
        self._name, self._url = command or url, url
        self._server = None
        if command:
            self._server = self._mcp.StdioServerParameters(
                command=command, args=list(args), env=dict(env or {}), cwd=cwd
            )
        self._timeout_s, self._keep, self._only = timeout_s, keep, frozenset(only)
        self._tools: list[Tool] = []
        self._stop = asyncio.Event()
        self._client_task: asyncio.Task[None] | None = None

    async def begin(self, data: Mapping[str, Any] = MappingProxyType({})) -> Sequence[Tool]:
        if self._client_task is None or self._client_task.done() or not self._keep:
            await self.close()
            await self._start()
        return self._tools

    async def close(self) -> None:
        task, self._client_task = self._client_task, None
        if task is not None:
            self._stop.set()
            await _wait_for_task(task)

    async def _start(self) -> None:
        """Run the client in a task of its own, because the task that enters the client must also leave it."""
        self._stop = asyncio.Event()
        ready: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self._client_task = asyncio.create_task(self._run_client(ready), name=f"mcp {self._name}")
        both: set[asyncio.Future[Any]] = {ready, self._client_task}
        try:
            await asyncio.wait(both, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not ready.done():
                failed = self._client_task.done()
                self._client_task.cancel()
                error = await _wait_for_task(self._client_task)
        if not ready.done():
            raise self._fail(f"did not start: {error}" if failed else f"did not start within {self._timeout_s} s")
        self._tools = ready.result()

    async def _run_client(self, ready: asyncio.Future[list[Tool]]) -> None:
        with _open_devnull() as devnull:
            transport = self._url or self._mcp.stdio_client(self._server, errlog=devnull)
            async with self._mcp.Client(transport, read_timeout_seconds=self._timeout_s) as client:
                listed, cursor = [], None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    listed += page.tools
                    cursor = page.next_cursor
                    if not cursor:
                        break
                wanted = [one for one in listed if not self._only or one.name in self._only]
                ready.set_result([self._make_tool(client, one) for one in wanted])
                await self._stop.wait()

    def _make_tool(self, client: Any, listed: Any) -> Tool:
        async def call(arguments: ToolArguments) -> str:
            try:
                answer = await client.call_tool(listed.name, dict(arguments))
            except self._mcp.MCPError as error:
                if error.error.code == _INVALID_PARAMETERS:
                    raise ToolRefused(str(error)) from error
                raise self._fail(f"{listed.name}: {error}") from error
            text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in answer.content)
            if answer.is_error:
                raise ToolRefused(text)
            return text

        return Tool(name=listed.name, description=listed.description or "", parameters=listed.input_schema, call=call)

    def _fail(self, what: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"the MCP server {self._name} {what}")


def _open_devnull() -> TextIO:
    """Open the file that swallows the server's standard error."""
    return Path(os.devnull).open("w")


async def _wait_for_task(task: asyncio.Task[None]) -> BaseException | None:
    """Wait for the end of a task and return the exception it raised, the innermost one of a group."""
    await asyncio.wait({task})
    error = None if task.cancelled() else task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
