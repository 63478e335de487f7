"""A virtual clock: an asyncio event loop whose time jumps to the next timer instead of passing.

Guarantees: `time()` starts at 0 and moves only when nothing is ready; callbacks run first in, first out; timers of
equal time run in the order they were set; no system call is made, so the same program runs the same way every time.
A program that can never continue fails at once (`Deadlock`), one that never ends fails at a limit (`Stalled`), and an
exception in a bare callback ends the run instead of being logged.

Input and output, threads, signals and subprocesses are not supported: on a virtual clock they have no meaning.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context
from heapq import heapify, heappop, heappush
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack

from headway.errors import Deadlock, HeadwayError, Stalled

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

DescribeWaits = Callable[[], str]

_COMPACT_ABOVE = 512
_CLEANUP_EVENTS = 1_000_000
"""Callbacks that cancelled tasks may still run before the cleanup gives up on them."""


class _Task(asyncio.Task[Any]):
    """Hashes by number, not by address, so that task groups cancel their tasks in the same order in every process."""

    def __init__(self, coro: Any, *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualEventLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time. Use `run_on_virtual_clock`, which also cleans up."""

    _ready: deque[asyncio.Handle]
    _stopping: bool
    _asyncgens: set[AsyncGenerator[Any, Any]]

    def __init__(
        self, *, describe: DescribeWaits | None = None, max_events: int | None = None, max_time_s: float | None = None
    ) -> None:
        super().__init__()
        self.describe = describe
        """Returns who waits for what, for the message of `Deadlock` and `Stalled`. May be set at any time."""
        self.max_events = max_events
        self.max_time_s = max_time_s
        self.events = 0
        """Callbacks run so far."""
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_count = 0
        self._cancelled_timers = 0
        self._failure: BaseException | None = None
        self._task_count = 0
        self.set_task_factory(self._make_task)

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> _Task:
        self._task_count += 1
        return _Task(coro, number=self._task_count, loop=loop, **options)

    def time(self) -> float:
        return self._now

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timer_count += 1
        heappush(self._timers, (when, self._timer_count, timer))
        return timer

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Remove cancelled timers once they are half of the heap. (Those that had fired are counted too.)"""
        self._cancelled_timers += 1
        if self._cancelled_timers > max(_COMPACT_ABOVE, len(self._timers) // 2):
            # `handle` itself is not marked as cancelled yet; it stays until the next time.
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapify(self._timers)
            self._cancelled_timers = 0

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and not self._stopping:
            self._advance()
        timers = self._timers
        while timers and timers[0][0] <= self._now:
            ready.append(heappop(timers)[2])
        count = len(ready)
        self.events += count
        if self.max_events is not None and self.events > self.max_events:
            self._give_up(f"no end after {self.max_events} events")
        for _ in range(count):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _advance(self) -> None:
        """Jump to the next timer that is not cancelled."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heappop(timers)
        if not timers:
            problem = f"nothing is scheduled at t = {self._now:.6g} s and the run has not ended"
            raise Deadlock(self._add_description(problem))
        when = timers[0][0]
        if self.max_time_s is not None and when > self.max_time_s:
            self._give_up(f"no end by {self.max_time_s} s of virtual time")
        if when > self._now:
            self._now = when

    def _give_up(self, problem: str) -> NoReturn:
        raise Stalled(self._add_description(f"{problem}; t = {self._now:.6g} s, {self.events} events"))

    def _add_description(self, problem: str) -> str:
        return f"{problem}\n{self.describe()}" if self.describe is not None else problem

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End the run with the exception of a callback, which is a bug; log everything else as usual."""
        exception = context.get("exception")
        if "handle" in context and exception is not None:
            self._failure = self._failure or exception
        else:
            super().call_exception_handler(context)

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> NoReturn:
        raise NotImplementedError("threads cannot reach a virtual clock: call_soon_threadsafe is not supported")

    def run_in_executor(self, executor: Any, func: Callable[[Unpack[Ts]], Any], *args: *Ts) -> NoReturn:
        raise NotImplementedError(f"no threads on a virtual clock: run_in_executor({func!r}) is not supported")

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        self._asyncgens.discard(agen)
        if not self.is_closed():
            self.create_task(agen.aclose())


def run_on_virtual_clock(
    main: Coroutine[Any, Any, T],
    *,
    describe: DescribeWaits | None = None,
    max_events: int | None = None,
    max_time_s: float | None = None,
) -> T:
    """Run `main` to its end in virtual time, then cancel the tasks it left behind, like `asyncio.run`."""
    loop = VirtualEventLoop(describe=describe, max_events=max_events, max_time_s=max_time_s)
    try:
        result = loop.run_until_complete(main)
    except BaseException as failure:
        try:
            _clean_up(loop)
        except HeadwayError as stuck:
            failure.add_note(f"and what was left could not be cancelled: {stuck}")
        raise
    else:
        _clean_up(loop)
        return result
    finally:
        loop.close()


def _clean_up(loop: VirtualEventLoop) -> None:
    """Cancel every task, let them end, close asynchronous generators."""
    loop.max_time_s = None
    loop.max_events = loop.events + _CLEANUP_EVENTS
    # `all_tasks` is a set, and the cleanup must be the same every time: sort by name, numbers in their order.
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name()))
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    for task in tasks:
        if not task.cancelled() and task.exception() is not None:
            problem = "a task left over failed while it was cancelled"
            loop.call_exception_handler({"message": problem, "exception": task.exception()})
