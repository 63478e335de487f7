"""Calls that wait for their answers, whoever carries both.

A call is `("call", number, method, arguments)` and may be followed by `("cancel", number)`; what comes back is
`("done", number, value)`, `("fail", number, error)`, or of either that cannot be read `("unread", kind, number, why)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from headway.cluster.base import PeerFailed, PeerLost
from headway.cluster.wire import error_from_wire


class Calls:
    """Of one peer. `send` raises `TypeError` or `ValueError` for what cannot travel, and never blocks."""

    def __init__(self, name: str, send: Callable[[Any], None]) -> None:
        self._name, self._send = name, send
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def call(self, method: str, *args: Any) -> Any:
        """What is answered. Cancelled here, the other side is told."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            self._send(("call", number, method, list(args)))
        except (TypeError, ValueError) as error:
            raise PeerFailed(f"{method} cannot be asked of {self._name}: {error}") from error
        self._waiting[number] = answer
        try:
            return await answer
        except asyncio.CancelledError:
            self._send(("cancel", number))
            raise
        finally:
            del self._waiting[number]

    def answered(self, kind: str, *rest: Any) -> None:
        """By one of the messages above; nothing where nobody waits any more."""
        if kind == "unread":
            _, number, why = rest
            value: Any = {"error": "", "message": f"the answer of {self._name} cannot be read: {why}"}
        else:
            number, value = rest
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return
        if kind == "done":
            answer.set_result(value)
        else:
            answer.set_exception(error_from_wire(value))

    def lose(self, how: str) -> None:
        """Whoever waits gets `PeerLost`."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(PeerLost(how))
