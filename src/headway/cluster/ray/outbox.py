"""Messages that wait to be carried to the other side, in order, as many at once as there are."""

from __future__ import annotations

import asyncio
from typing import Any

from headway.cluster.wire import encode

Parcel = tuple[bytes, list[Any]]
"""Frames one after the other, and the references in them."""


class Outbox:
    """Filled from the event loop's thread."""

    def __init__(self) -> None:
        self.filled = asyncio.Event()
        self._frames: list[bytes] = []
        self._refs: list[Any] = []

    def send(self, message: Any) -> None:
        """Raises `TypeError` or `ValueError` for what cannot travel."""
        self._frames.append(encode(message, self._refs))
        self.filled.set()

    def take(self) -> Parcel:
        """Everything until now."""
        parcel = b"".join(self._frames), self._refs
        self._frames, self._refs = [], []
        self.filled.clear()
        return parcel
