"""Messages that wait to be carried to the other side, in order, as many at once as there are.

Every parcel costs about a millisecond of both sides, whatever is in it. So notes, which nobody waits for, are held back
a moment: an answer that follows takes them along.
"""

from __future__ import annotations

import asyncio
from typing import Any

from headway.cluster.wire import encode

Parcel = tuple[bytes, list[Any]]
"""Frames one after the other, and the references in them."""
_PATIENCE_S = 0.005


class Outbox:
    """Filled from the event loop's thread."""

    def __init__(self) -> None:
        self.filled = asyncio.Event()
        """There is something that should leave now."""
        self._frames: list[bytes] = []
        self._refs: list[Any] = []
        self._later: asyncio.TimerHandle | None = None

    def send(self, message: Any) -> None:
        """Raises `TypeError` or `ValueError` for what cannot travel."""
        self._frames.append(encode(message, self._refs))
        if message[0] != "note":
            self.filled.set()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(_PATIENCE_S, self.filled.set)

    def take(self) -> Parcel:
        """Everything until now."""
        parcel = b"".join(self._frames), self._refs
        self._frames, self._refs = [], []
        self.filled.clear()
        if self._later is not None:
            self._later.cancel()
            self._later = None
        return parcel
