"""The endpoint of a training run: sessions on a port of this machine, from the first episode to the end of the run."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import TYPE_CHECKING

from headway.errors import ConfigError
from headway.serving.chat import Dialect
from headway.serving.sessions import Session, Sessions

if TYPE_CHECKING:
    from headway.serving.server import Server

_MOST_REQUESTS = 1 << 20
"""Sessions have limits of their own, and there are as many as the run has episodes."""


def check_installed() -> None:
    """Raises `ConfigError` where HTTP cannot be spoken."""
    if find_spec("aiohttp") is None:
        raise ConfigError("serving needs aiohttp", hint="pip install 'headway[serve]'")


class RunEndpoint:
    """Started by the first session that asks for its address. Every session has a key of its own."""

    def __init__(self, dialect: Dialect, *, model: str = "policy") -> None:
        self.sessions, self.dialect, self.model = Sessions(dialect), dialect, model
        self._server: Server | None = None
        self._address = ""
        self._starting = asyncio.Lock()

    async def url(self, session: Session) -> str:
        """The `base_url` of a session. Raises `ConfigError` where no port can be had."""
        async with self._starting:
            if self._server is None:
                self._server, self._address = await self._start()
        return f"{self._address}/sessions/{session.session_id}/v1"

    async def close(self) -> None:
        """Idempotent. Sessions that are still open are closed first, so that nobody waits."""
        self.sessions.close_all()
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def _start(self) -> tuple[Server, str]:
        from headway.serving.server import Limits, Server, Service

        service = Service(model=self.model, dialect=self.dialect, sessions=self.sessions)
        server = Server(service, limits=Limits(requests=_MOST_REQUESTS, shutdown_s=1.0))
        return server, await server.start()
