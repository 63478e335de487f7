"""The base of engines whose model runs in a thread of this process: the native engine and the denoising engine.

Guarantees: nothing here blocks the event loop. Actions are recorded in order, in stretches of one version; nothing is
recorded after `generate` has returned or raised; an abort keeps what was made; an error in the model is `EngineCrashed`
for everybody, an unserviceable request is `EngineError` for itself only. An engine that ran out of memory comes back
with half the slots. Does not know what a step computes.
"""

from __future__ import annotations

import asyncio
import gc
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from headway.engines.base import Progress, Request, ResettableReceiver
from headway.engines.engine_thread import EngineCore, EngineThread, RequestUpdate
from headway.errors import EngineCrashed
from headway.types import FinishReason
from headway.weights.base import WeightReceiver

if TYPE_CHECKING:
    from headway.engines.native.settings import NativeSettings

_JOIN_S = 10.0
"""How long a thread may take to end before it is left behind."""

SwitchWeights = Callable[[int, Mapping[str, Tensor]], Awaitable[None]]
"""Serves these tensors, in any dtype, as this version, between two actions."""
MakeReceiver = Callable[[SwitchWeights], ResettableReceiver]
B = TypeVar("B")
"""What a receiver needs to know of the model that the thread has built."""


class ScheduledRequest(Protocol):
    """A request as the core of an engine sees it."""

    number: int
    """Unique in the engine: a request may come back under the same id before its first attempt is gone."""


@dataclass(frozen=True, slots=True, eq=False)
class _PendingRequest:
    """One call of `generate`."""

    request_id: str
    number: int
    progress: Progress
    end: asyncio.Future[FinishReason]


class ThreadedEngine(ABC, Generic[B]):
    """A subclass sets `_receiver`, and says how a request is accepted and how the core is built."""

    _receiver: ResettableReceiver

    def __init__(self, name: str, settings: NativeSettings) -> None:
        self.name = name
        self._settings = settings
        self._pending: dict[int, _PendingRequest] = {}
        self._by_id: dict[str, _PendingRequest] = {}
        self._numbers = count()
        self._thread: EngineThread | None = None
        self._built: asyncio.Future[B] | None = None
        self._down = False
        self._closed = False

    @abstractmethod
    def _accept(self, request: Request, progress: Progress) -> tuple[ScheduledRequest, FinishReason | None]:
        """Return the request for the core, and how it has ended already, if it has. Raises `EngineError`."""

    @abstractmethod
    def _build(self) -> tuple[B, EngineCore[Any, Any]]:
        """Make model and core, all new. Runs in the thread."""

    @abstractmethod
    async def switch(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Serve `tensors` as `version`, between two actions: for receivers that are not the engine's own."""

    # What the hub calls.

    @property
    def slots(self) -> int:
        return self._settings.slots

    @property
    def receiver(self) -> WeightReceiver:
        return self._receiver

    async def start(self) -> None:
        """Do nothing: the first weights or the first request start the thread."""

    async def generate(self, request: Request, progress: Progress) -> FinishReason:
        scheduled, finish = self._accept(request, progress)
        if finish is not None:
            return finish
        pending = _PendingRequest(request.request_id, scheduled.number, progress, asyncio.Future())
        self._pending[pending.number] = self._by_id[pending.request_id] = pending
        try:
            self._get_thread().call(lambda core: core.add(scheduled))
            return await pending.end
        finally:
            if self._forget(pending) and not (self._down or self._closed):  # cancelled
                self._get_thread().call(lambda core: core.abort(pending.number))

    async def abort(self, request_id: str) -> None:
        pending = self._by_id.get(request_id)
        if pending is not None and not (self._down or self._closed):
            await self._get_thread().call(lambda core: core.abort(pending.number))

    async def pause(self) -> None:
        await self._get_thread().call(lambda core: core.pause())

    async def resume(self) -> None:
        if self._thread is not None and not (self._down or self._closed):  # a new core is not paused
            await self._get_thread().call(lambda core: core.resume())

    async def restart(self) -> None:
        if self._closed:
            raise EngineCrashed(f"{self.name} is closed")
        thread = self._thread
        self._go_down(EngineCrashed(f"{self.name} is restarted"))
        if thread is not None and self._settings.device != "cpu":  # its memory is needed again
            await thread.wait_until_ended(_JOIN_S)
        del thread  # refers to the weights
        self._down = False
        self._receiver.reset(gone=False)
        try:
            await self._wait_until_built()
        except Exception as error:
            self._go_down(EngineCrashed(f"{self.name} does not come up: {error}"))
            raise EngineCrashed(f"{self.name} does not come up: {error}") from error

    async def sleep(self) -> None:
        """Free weights, KV cache and model; the next version that arrives brings them back."""
        self._check_up()
        thread, self._thread, self._built = self._thread, None, None
        if thread is not None:
            thread.stop(EngineCrashed(f"{self.name} sleeps"))
            await thread.wait_until_ended(_JOIN_S)
        del thread  # refers to the weights
        self._receiver.reset(gone=False)
        if self._settings.device != "cpu":
            gc.collect()  # modules refer to each other in circles
            torch._C._cuda_clearCublasWorkspaces()  # each stream has one, and an engine that wakes up has a new stream
            torch.cuda.empty_cache()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.wait([thread.call(lambda core: core.pause())], timeout=_JOIN_S)
            thread.stop(EngineCrashed(f"{self.name} is closed"))
        for pending in list(self._pending.values()):
            self._forget(pending)
            _set_result(pending.end, FinishReason.ABORTED)
        self._receiver.reset(gone=True)
        if thread is not None:
            await thread.wait_until_ended(_JOIN_S)

    # What the thread reports.

    def _on_updates(self, updates: list[RequestUpdate], version: int) -> None:
        for update in updates:
            pending = self._pending.get(update.number)
            if pending is None:
                continue
            pending.progress.extend(update.actions, update.logps, version)
            if update.routing is not None:
                pending.progress.add_routing(update.routing)
            if update.finish is not None:
                self._forget(pending)
                _set_result(pending.end, update.finish)

    def _on_crash(self, thread: EngineThread, error: BaseException) -> None:
        if thread is self._thread:
            if isinstance(error, torch.OutOfMemoryError):
                self._settings = self._settings.halve_batch()
            crash = EngineCrashed(f"{self.name}: {type(error).__name__}: {error}")
            crash.__cause__ = error
            self._go_down(crash)

    async def _wait_until_built(self) -> B:
        self._get_thread()
        assert self._built is not None
        return await asyncio.shield(self._built)

    async def _hold(self) -> None:
        """Let the core stop until it gets other weights."""
        await self._get_thread().call(lambda core: core.hold())

    async def _flip(self, weights: Any, version: int) -> None:
        """Make the core serve `weights`, which are laid out as it needs them."""
        await self._get_thread().call(lambda core: core.flip(weights, version))

    def _get_thread(self) -> EngineThread:
        """Return the thread; start it where there is none."""
        self._check_up()
        if self._thread is None:
            loop = asyncio.get_running_loop()
            built: asyncio.Future[B] = loop.create_future()
            self._built = built

            def build() -> EngineCore[Any, Any]:
                torch.set_num_threads(self._settings.threads)
                result, core = self._build()
                if self._settings.device != "cpu":
                    gc.collect()
                    gc.freeze()  # full collections would look at all that was imported and stop the device meanwhile
                loop.call_soon_threadsafe(_set_result, built, result)
                return core

            self._thread = EngineThread(self.name, build, self._on_updates, self._on_crash)
        return self._thread

    def _forget(self, pending: _PendingRequest) -> bool:
        """Remove a request; returns whether it was still known."""
        if self._by_id.get(pending.request_id) is pending:
            del self._by_id[pending.request_id]
        return self._pending.pop(pending.number, None) is not None

    def _go_down(self, error: EngineCrashed) -> None:
        """Lose everything."""
        self._down = True
        thread, self._thread = self._thread, None
        built, self._built = self._built, None
        self._receiver.reset(gone=True)
        if thread is not None:
            thread.stop(error)
        if built is not None:
            _set_exception(built, error)
        for pending in list(self._pending.values()):
            self._forget(pending)
            _set_exception(pending.end, error)

    def _check_up(self) -> None:
        if self._down or self._closed:
            raise EngineCrashed(f"{self.name} is {'closed' if self._closed else 'down'}")


def _set_result(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # marks it as retrieved, because it may have no waiter
