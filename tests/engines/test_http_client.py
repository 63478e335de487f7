"""The HTTP client of server engines against a real server: whatever goes wrong is one of its two errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from headway.engines.servers.http_client import HttpClient
from headway.engines.streaming_engine import BackendLost


@asynccontextmanager
async def streaming_server() -> AsyncIterator[str]:
    """Serve one event to each request, and then nothing."""

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"n": 1}\n\n')
        await asyncio.sleep(30.0)
        return response

    app = web.Application()
    app.router.add_post("/stream", stream)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_a_stream_read_after_its_client_was_closed_is_lost() -> None:
    async def scenario() -> None:
        async with streaming_server() as url:
            client = HttpClient(url)
            events = client.stream("/stream", {}, silence_s=20.0)
            assert await anext(events) == {"n": 1}
            await client.close()
            with pytest.raises(BackendLost, match=r"Connection closed|closed"):
                await anext(events)

    asyncio.run(asyncio.wait_for(scenario(), 10.0))
