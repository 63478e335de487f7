"""The thread that owns a core: commands go in, deliveries come out, torch runs nowhere else.

Guarantees: commands are carried out between two steps, in the order they were given; what a command or a step delivers
reaches the event loop before its answer and before anything later. An error in a step ends the worker and is
reported once, after what was made before it. A worker told to stop takes no further step and reports nothing more;
one that hangs inside a step is left behind, and cannot be heard again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from traceback import clear_frames
from typing import Any, Protocol

from headway.engines.native.native_core import EngineCore
from headway.engines.native.native_scheduler import RequestUpdate

CoreCommand = Callable[[EngineCore], list[RequestUpdate]]


class ThreadListener(Protocol):
    """Who is told, on the event loop."""

    def delivered(self, news: list[RequestUpdate], version: int) -> None:
        """Actions and ends, all of `version`."""
        ...

    def crashed(self, worker: EngineThread, error: BaseException) -> None:
        """The worker has ended by itself."""
        ...


class EngineThread:
    """Starts when it is made. `build` runs in the new thread."""

    def __init__(self, name: str, build: Callable[[], EngineCore], listener: ThreadListener) -> None:
        self._build = build
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[tuple[CoreCommand, asyncio.Future[None]] | None] = SimpleQueue()
        self._stopped = False
        self._out: set[asyncio.Future[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # On the event loop.

    def ask(self, command: CoreCommand) -> asyncio.Future[None]:
        """Carry out a command between two steps."""
        answer: asyncio.Future[None] = self._loop.create_future()
        self._out.add(answer)
        answer.add_done_callback(self._out.discard)
        self._inbox.put((command, answer))
        return answer

    def stop(self, error: BaseException) -> None:
        """No further step. Commands not answered fail with `error`."""
        self._stopped = True
        self._inbox.put(None)
        for answer in list(self._out):
            if not answer.done():
                answer.set_exception(error)
                answer.exception()

    async def ended(self, timeout_s: float) -> bool:
        """Whether the thread is gone in time."""
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    # In the thread.

    def _run(self) -> None:
        core: EngineCore | None = None
        try:
            core = self._build()
            while not self._stopped:
                self._obey(core)
                if core.runnable and not self._stopped:
                    self._tell(core.step(), core)
        except BaseException as error:  # whatever it is, somebody is waiting for this thread
            if core is not None:
                self._tell(core.scheduler.flush(), core)
            core = None
            clear_frames(error.__traceback__)  # whoever keeps the error must not keep the model and its memory
            self._post(self._listener.crashed, self, error)

    def _obey(self, core: EngineCore) -> None:
        """Carry out what has come in; without anything to do, wait for it."""
        while not self._stopped and not (self._inbox.empty() and core.runnable):
            item = self._inbox.get()
            if item is None:
                return
            command, answer = item
            self._tell(command(core), core)
            self._post(_answer, answer)

    def _tell(self, news: list[RequestUpdate], core: EngineCore) -> None:
        if news:
            self._post(self._deliver, news, core.made_by)

    def _deliver(self, news: list[RequestUpdate], version: int) -> None:
        if not self._stopped:
            self._listener.delivered(news, version)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            self._stopped = True


def _answer(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
