"""What engines have in common that answer a request by one stream after the other: whom they take, and for how long.

Guarantees: `generate` returns or raises when its last stream is over, and whoever waits for that (`Ticket.over`) is
told then. Does not know how a stream is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from headway.engines.base import Progress, Request, check_request
from headway.engines.servers.stops import Stops
from headway.engines.servers.ticket import Ticket
from headway.errors import EngineCrashed, EngineError
from headway.types import FinishReason
from headway.weights.base import WeightReceiver


class ByStreams(ABC):
    """`ends`: tokens that end an answer. `decode` is needed for stop strings only."""

    receiver: WeightReceiver

    def __init__(
        self, name: str, *, context_tokens: int, ends: Iterable[int], decode: Callable[[list[int]], str] | None
    ) -> None:
        self.name = name
        self._context_tokens = context_tokens
        self._ends, self._decode = sorted(set(ends)), decode
        self._tickets: dict[str, Ticket] = {}
        self._down: EngineCrashed | None = None
        self._closed = False

    async def generate(self, request: Request, progress: Progress) -> FinishReason:
        ticket = self._accepted(request, progress)
        stops = Stops(request.params.stop, self._decode)
        finish = self._over_already(ticket, stops)
        if finish is not None:
            return finish
        self._tickets[request.request_id] = ticket
        try:
            while finish is None:
                finish = await self._stretch(ticket, stops)
            return finish
        finally:
            del self._tickets[request.request_id]
            ticket.over.set()

    @abstractmethod
    async def _stretch(self, ticket: Ticket, stops: Stops) -> FinishReason | None:
        """One stream. `None`: it was ended on our side, and the request goes on in another."""
        ...

    def _accepted(self, request: Request, progress: Progress) -> Ticket:
        """Or why not."""
        self._check_up()
        where = f"{self.name}: {request.request_id}"
        check_request(
            request,
            where,
            version=self.receiver.version,
            running=request.request_id in self._tickets,
            decodes=self._decode is not None,
        )
        length, room = len(request.prompt) + len(progress.actions), self._context_tokens
        if length >= room:
            raise EngineError(f"{where}: {length} tokens leave no room in a context of {room}")
        return Ticket(request, progress)

    def _over_already(self, ticket: Ticket, stops: Stops) -> FinishReason | None:
        """A request that comes back with all that it wanted."""
        actions = ticket.progress.actions
        if len(actions) and (actions[-1] in self._ends or stops.completed(actions)):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(actions) >= ticket.request.params.max_new_tokens else None

    def _room(self, ticket: Ticket) -> int:
        """Tokens that its next stream may make."""
        made = len(ticket.progress.actions)
        wanted = ticket.request.params.max_new_tokens - made
        return min(wanted, self._context_tokens - len(ticket.request.prompt) - made)

    def _check_up(self) -> None:
        if self._closed:
            raise EngineCrashed(f"{self.name} is closed")
        if self._down is not None:
            raise EngineCrashed(str(self._down)) from self._down
