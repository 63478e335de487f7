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
async def streaming_server() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Serve one event to each request for a stream, and then nothing. `/hang` sets the event and does not answer."""
    arrived = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"n": 1}\n\n')
        await asyncio.sleep(3600.0)
        return response

    async def hang(request: web.Request) -> web.Response:
        arrived.set()
        await asyncio.sleep(3600.0)
        return web.Response()

    app = web.Application()
    app.router.add_post("/stream", stream)
    app.router.add_get("/hang", hang)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", arrived
    finally:
        await runner.cleanup()


def test_closing_the_client_ends_what_waits_for_the_server_and_what_comes_later() -> None:
    async def scenario() -> None:
        async with streaming_server() as (url, arrived):
            client = HttpClient(url)
            read, waiting = (client.stream("/stream", {}, silence_s=3600.0) for _ in range(2))
            assert await anext(read) == await anext(waiting) == {"n": 1}
            calls = [asyncio.create_task(anext(waiting)), asyncio.create_task(client.get("/hang", timeout_s=3600.0))]
            await arrived.wait()
            await client.close()
            for lost in (*calls, anext(read), client.get("/hang", timeout_s=3600.0)):
                with pytest.raises(BackendLost, match=r"[Cc]losed|disconnected"):
                    await lost

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
