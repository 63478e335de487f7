"""Names the code that blocks an event loop: while it does, on the error output, and afterwards to whoever asks.

A loop that is blocked neither schedules nor answers an interrupt, so a thread watches it.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from headway.processes.stack_dumps import describe_thread


class LoopWatchdog:
    """Watches the running event loop inside a `with` block. `report` gets a sentence after every long block.

    `on_block` is called on the thread of the watchdog while the loop is blocked.
    """

    def __init__(
        self, report: Callable[[str], None], *, on_block: Callable[[str], None] | None = None, limit_s: float = 5.0
    ) -> None:
        self._report, self._on_block, self._limit_s = report, on_block, limit_s
        self._loop, self._ident = asyncio.get_running_loop(), threading.get_ident()
        self._stopped = threading.Event()
        self._answered = threading.Event()
        self.is_blocked = False
        """Whether the loop has not answered for longer than the limit."""

    def __enter__(self) -> "LoopWatchdog":
        threading.Thread(target=self._watch, name="loop watchdog", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._answered.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self._limit_s / 4):
            self._answered.clear()
            with suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._answered.set)
            if not self._stopped.is_set() and not self._answered.wait(self._limit_s):
                self._tell()

    def _tell(self) -> None:
        began_s, where = time.monotonic() - self._limit_s, describe_thread(self._ident, libraries=True)
        self.is_blocked = True
        print(f"the run stands still: its event loop is blocked{where}", file=sys.stderr, flush=True)
        if self._on_block is not None:
            self._on_block(f"the event loop is blocked{where}")
        self._answered.wait()
        self.is_blocked = False
        blocked_s = time.monotonic() - began_s
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._report, f"the event loop was blocked for {blocked_s:.0f} s{where}")
