"""A small MCP server over stdio, or over HTTP with `--port`, for the tests, written with the official library."""

from __future__ import annotations

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("counter")
count = 0


@server.tool()
def add(number: int) -> str:
    """Add to the counter."""
    global count
    count += number
    print("to the log", file=sys.stderr)
    return f"The counter is at {count}."


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("it had to fail")


if __name__ == "__main__":
    if "--port" in sys.argv:
        server.run("streamable-http", port=int(sys.argv[-1]))
    server.run()
