"""One call of `generate`, as the engine keeps track of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from headway.engines.base import Progress, Request
from headway.errors import EngineCrashed


class StreamedRequest:
    """Has one stream after the other, and waits in between."""

    __slots__ = ("aborted", "error", "fed", "key", "over", "progress", "request", "scope")

    def __init__(self, request: Request, progress: Progress) -> None:
        self.request, self.progress = request, progress
        self.key = ""
        """The server's name for the stream it has now; empty: it has none."""
        self.fed = False
        """That stream has brought something."""
        self.aborted = False
        self.error: EngineCrashed | None = None
        self.scope: asyncio.Timeout | None = None
        self.over = asyncio.Event()

    def interrupt(self) -> None:
        """Leave the stream, or the wait for one, now."""
        if self.scope is not None:
            with suppress(RuntimeError):  # it is being left already
                self.scope.reschedule(asyncio.get_running_loop().time())
