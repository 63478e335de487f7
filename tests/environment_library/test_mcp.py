"""MCP: a real server over stdio, fresh for every episode, gone afterwards, and what happens when it is bad."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headway.environments.tools.base import ToolRefused
from headway.environments.tools.mcp_tools import MCPToolSource
from headway.environments.tools.tool_environment import ToolEnvironment
from headway.errors import ConfigError, EnvironmentFailed
from tests.sandbox.factory import processes_with

pytest.importorskip("mcp")
SERVER = str(Path(__file__).with_name("mcp_server.py"))


ADD = '<tool_call>{"name": "add", "arguments": {"number": 20}}</tool_call>'


def test_a_server_gives_its_tools_to_an_episode_and_ends_with_it() -> None:
    async def scene() -> None:
        marker = f"--counter-of-{os.getpid()}"
        world = ToolEnvironment(tools=[{"name": "mcp", "command": sys.executable, "args": [SERVER, marker]}])
        opening = await world.reset(0, {"question": "How much?", "answer": 40})
        assert '"name": "add"' in opening and opening.endswith("How much?")
        assert len(processes_with(marker)) == 1
        await world.step(ADD)
        assert "The counter is at 40." in (await world.step(ADD)).text
        failed = await world.step('<tool_call>{"name": "fail", "arguments": {}}</tool_call>')
        assert "Error executing tool fail" in failed.text and failed.info["refused"] == 1
        assert not (await world.step(ADD.replace("20", '"x"'))).valid
        assert (await world.step("<answer>40</answer>")).reward == 1.0
        await world.close()
        await world.close()
        assert processes_with(marker) == []

    asyncio.run(scene())


def test_a_server_behind_a_url_gives_the_tools_that_are_wanted() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, SERVER, "--port", str(port)], stderr=subprocess.DEVNULL)

    async def scene() -> None:
        for _ in range(600):
            try:
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                break
            except OSError:
                await asyncio.sleep(0.1)
        source = MCPToolSource(url=f"http://127.0.0.1:{port}/mcp", only=["add"], timeout_s=60)
        (tool,) = await source.begin()
        assert await tool.call({"number": 2}) == "The counter is at 2."
        await source.close()

    try:
        asyncio.run(scene())
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(("keep", "count"), [(False, "1"), (True, "2")])
def test_a_server_is_fresh_for_every_episode_unless_it_is_kept(tmp_path: Path, keep: bool, count: str) -> None:
    async def scene() -> None:
        source = MCPToolSource(command=sys.executable, args=[small_server(tmp_path)], timeout_s=5, keep=keep)
        for _ in range(2):
            tools = {tool.name: tool for tool in await source.begin()}
            last = await tools["count"].call({})
        assert last == count and len(processes_with(str(tmp_path))) == 1
        await source.close()
        assert processes_with(str(tmp_path)) == []

    asyncio.run(scene())


def test_a_server_that_is_none_loses_the_episode() -> None:
    async def scene() -> None:
        for arguments in (["-c", "print('hello')"], ["-c", "import sys; sys.exit(3)"]):
            with pytest.raises(EnvironmentFailed, match="did not start"):
                await MCPToolSource(command=sys.executable, args=arguments, timeout_s=5).begin()
        with pytest.raises(EnvironmentFailed, match="did not start"):
            await MCPToolSource(command="/no/such/program").begin()

    asyncio.run(scene())


def test_a_silent_server_is_ended() -> None:
    async def scene() -> None:
        marker = f"silent-server-of-{os.getpid()}"
        code = f"import signal; signal.pause()  # {marker}"
        tools = MCPToolSource(command=sys.executable, args=["-c", code], timeout_s=0.3)
        with pytest.raises(EnvironmentFailed, match=r"within 0\.3 s"):
            await tools.begin()
        assert processes_with(marker) == []
        await tools.close()

    asyncio.run(scene())


def test_a_server_that_dies_in_a_call_loses_the_episode(tmp_path: Path) -> None:
    async def scene() -> None:
        source = MCPToolSource(command=sys.executable, args=[small_server(tmp_path)], timeout_s=5)
        tools = {tool.name: tool for tool in await source.begin()}
        with pytest.raises(ToolRefused, match="no such thing"):
            await tools["refuse"].call({})
        with pytest.raises(EnvironmentFailed, match="die"):
            await tools["die"].call({})
        await source.close()

    asyncio.run(scene())


def test_bad_options_are_refused() -> None:
    for options in ({"command": ""}, {"command": "x", "url": "y"}, {"command": "x", "timeout_s": 0}):
        with pytest.raises(ConfigError):
            MCPToolSource(**options)  # type: ignore[arg-type]


def small_server(folder: Path) -> str:
    """A server that starts quickly and misbehaves when asked to."""
    path = folder / "server.py"
    path.write_text(SMALL)
    return str(path)


SMALL = """
import json, sys
SCHEMA = {"type": "object", "properties": {}}
count = 0
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] == "initialize":
        answer["result"] = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                            "serverInfo": {"name": "small", "version": "1"}}
    elif asked["method"] == "tools/list":
        answer["result"] = {"tools": [{"name": name, "inputSchema": SCHEMA} for name in ("count", "die", "refuse")]}
    elif asked["method"] != "tools/call":
        answer["error"] = {"code": -32601, "message": "unknown"}
    elif asked["params"]["name"] == "count":
        count += 1
        answer["result"] = {"content": [{"type": "text", "text": str(count)}]}
    elif asked["params"]["name"] == "die":
        sys.exit(1)
    else:
        answer["error"] = {"code": -32602, "message": "no such thing"}
    print(json.dumps(answer), flush=True)
"""
