"""An engine that takes no time: what is left when the control plane itself is measured.

Every request ends at the next turn of the event loop with as many actions as its hint says. It takes more than `slots`
requests, has no queue and no faults; versions, pauses, aborts and flips behave as the protocol says.
"""

from __future__ import annotations

import asyncio

from headway.engines.base import Progress, Request
from headway.errors import EngineCrashed, EngineError
from headway.sim.continuous_batch import resolve_target_length
from headway.sim.simulated_weights import SimulatedReceiver
from headway.types import FinishReason, RepeatedValue
from headway.weights.base import WeightReceiver


class InstantEngine:
    """One replica without costs."""

    def __init__(self, name: str, *, slots: int = 64) -> None:
        self.name = name
        self.slots = slots
        self._receiver = SimulatedReceiver(self._switch)
        self.receiver: WeightReceiver = self._receiver
        self._closed = False
        self._restarts = 0
        self._gate: asyncio.Future[None] | None = None
        self._waiting: dict[str, bool] = {}
        """Requests under way, and whether each was aborted."""

    async def generate(self, request: Request, progress: Progress) -> FinishReason:
        if self._closed:
            raise EngineCrashed(f"{self.name} is closed")
        if self._receiver.version < 0:
            raise EngineError(f"{self.name} has no weights to serve {request.request_id} with")
        restarts, waiting = self._restarts, self._waiting
        waiting[request.request_id] = False
        try:
            await asyncio.sleep(0)
            while self._gate is not None and not waiting[request.request_id]:
                await asyncio.wait((self._gate,))
            aborted = waiting[request.request_id] or self._closed
        finally:
            waiting.pop(request.request_id, None)
        if restarts != self._restarts:
            raise EngineCrashed(f"{self.name} was restarted")
        if aborted:
            return FinishReason.ABORTED
        target, end = resolve_target_length(request)
        count = target - len(progress.actions)
        progress.extend(RepeatedValue(0, count), RepeatedValue(-1.0, count), self._receiver.version)
        return end

    async def abort(self, request_id: str) -> None:
        if request_id in self._waiting:
            self._waiting[request_id] = True
            self._open(reopen=True)

    async def pause(self) -> None:
        if self._gate is None:
            self._gate = asyncio.get_running_loop().create_future()

    async def resume(self) -> None:
        self._open(reopen=False)

    async def start(self) -> None:
        """Do nothing: it is up when it is made."""

    async def restart(self) -> None:
        self._restarts += 1
        self._waiting = {}
        self._open(reopen=False)
        self._receiver.reset(gone=False)

    async def close(self) -> None:
        self._closed = True
        self._open(reopen=False)

    async def _switch(self, version: int) -> None:
        self._receiver.version = version

    def _open(self, *, reopen: bool) -> None:
        """Wake the requests that wait; with `reopen`, those that were not aborted wait again."""
        gate = self._gate
        if gate is not None:
            self._gate = asyncio.get_running_loop().create_future() if reopen else None
            if not gate.done():
                gate.set_result(None)
