"""The thread that owns the core of an engine: commands go in, updates of requests come out, torch runs nowhere else.

Guarantees: commands are carried out between two steps, in the order they were given; what a command or a step returns
reaches the event loop before its answer and before anything later. An error in a step ends the thread and is reported
once, after what was made before it. A stopped thread takes no further step and reports nothing more; one that
hangs inside a step is left behind, and cannot be heard again.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from traceback import clear_frames
from typing import Any, Generic, Protocol, TypeVar

from headway.types import ExpertRouting, FinishReason


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """New actions of one request, and how it ended, if it has."""

    number: int
    actions: list[Any]
    logps: list[float]
    finish: FinishReason | None = None
    routing: ExpertRouting | None = None
    """Experts of tokens not yet reported; a mixture reports them with the end of a request."""


class RequestScheduler(Protocol):
    """The requests of a core, and which of them take part in the next step."""

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""

    def add(self, request: Any) -> None:
        """Take in a new request, or one that continues."""

    def remove(self, number: int) -> RequestUpdate | None:
        """Abort a request; returns what was not yet reported of it, None where it is not known."""

    def flush(self) -> list[RequestUpdate]:
        """Return everything not yet reported."""

    def forget_shared_prefixes(self) -> None:
        """Share nothing computed so far with requests that start later: other weights are served from now on."""


S = TypeVar("S", bound=RequestScheduler)
W = TypeVar("W")


class EngineCore(ABC, Generic[S, W]):
    """Scheduler and model of one replica, one step at a time: an engine without threads or a clock.

    Everything here runs in one thread. `install` serves other weights from the next step on.
    """

    def __init__(self, scheduler: S, install: Callable[[W], None]) -> None:
        self.scheduler = scheduler
        self.version = -1
        self.made_by = -1
        """The version that made what was returned last."""
        self._install = install
        self._paused = False
        self._replacing = False
        """Whether weights are replaced where they are served, so that no step may use them."""

    @property
    def runnable(self) -> bool:
        """Whether `step` would do anything."""
        return not (self._paused or self._replacing) and self.scheduler.busy

    def add(self, request: Any) -> list[RequestUpdate]:
        """Take a request in."""
        self.scheduler.add(request)
        return []

    def abort(self, number: int) -> list[RequestUpdate]:
        """End a request now."""
        update = self.scheduler.remove(number)
        return [] if update is None else [update]

    def pause(self) -> list[RequestUpdate]:
        """Take no more steps until `resume`; returns everything made so far."""
        self._paused = True
        return self._settle()

    def resume(self) -> list[RequestUpdate]:
        """Take steps again."""
        self._paused = False
        return []

    def hold(self) -> list[RequestUpdate]:
        """Take no more steps until `flip`, however often `resume` is called; returns everything made so far."""
        self._replacing = True
        return self._settle()

    def flip(self, weights: W, version: int) -> list[RequestUpdate]:
        """Serve other weights from the next step on; what is returned was made by the old ones."""
        self._install(weights)
        updates = self.scheduler.flush()
        self.scheduler.forget_shared_prefixes()
        self.version, self._replacing = version, False
        return updates

    def _settle(self) -> list[RequestUpdate]:
        """Return everything made so far."""
        return self.scheduler.flush()

    @abstractmethod
    def step(self) -> list[RequestUpdate]:
        """Compute one step of every request that is due."""


CoreCommand = Callable[[Any], list[RequestUpdate]]
"""Is called with the core, in its thread."""


class EngineThread:
    """Starts when it is made. `build` runs in the new thread and returns the core.

    On the event loop `on_updates` gets new actions and ends, all made by one version; `on_crash` is called when the
    thread has ended by itself.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], EngineCore[Any, Any]],
        on_updates: Callable[[list[RequestUpdate], int], None],
        on_crash: Callable[[EngineThread, BaseException], None],
    ) -> None:
        self._build = build
        self._on_updates, self._on_crash = on_updates, on_crash
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[tuple[CoreCommand, asyncio.Future[None]] | None] = SimpleQueue()
        self._stopped = False
        self._unanswered: set[asyncio.Future[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # On the event loop.

    def call(self, command: CoreCommand) -> asyncio.Future[None]:
        """Carry out a command between two steps."""
        answer: asyncio.Future[None] = self._loop.create_future()
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)
        self._inbox.put((command, answer))
        return answer

    def stop(self, error: BaseException) -> None:
        """Take no further step. Commands not answered fail with `error`."""
        self._stopped = True
        self._inbox.put(None)
        for answer in list(self._unanswered):
            if not answer.done():
                answer.set_exception(error)
                answer.exception()

    async def wait_until_ended(self, timeout_s: float) -> bool:
        """Return whether the thread ended in time."""
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    # In the thread.

    def _run(self) -> None:
        core: EngineCore[Any, Any] | None = None
        try:
            core = self._build()
            while not self._stopped:
                self._carry_out_commands(core)
                if core.runnable and not self._stopped:
                    self._report(core.step(), core)
        except BaseException as error:  # whatever it is, calls are waiting for this thread
            if core is not None:
                self._report(core.scheduler.flush(), core)
            core = None
            clear_frames(error.__traceback__)  # the error must not keep the model and its memory alive
            self._post(self._on_crash, self, error)

    def _carry_out_commands(self, core: EngineCore[Any, Any]) -> None:
        """Carry out the commands that have arrived; wait for one where no step can be taken."""
        while not self._stopped and not (self._inbox.empty() and core.runnable):
            item = self._inbox.get()
            if item is None:
                return
            command, answer = item
            self._report(command(core), core)
            del item, command  # refer to weights that have been installed and can be freed now
            self._post(_set_done, answer)

    def _report(self, updates: list[RequestUpdate], core: EngineCore[Any, Any]) -> None:
        if updates:
            self._post(self._deliver, updates, core.made_by)

    def _deliver(self, updates: list[RequestUpdate], version: int) -> None:
        if not self._stopped:
            self._on_updates(updates, version)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed
            self._stopped = True


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
