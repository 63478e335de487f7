"""Runs environments in this process: coroutines on an event loop, other code on threads.

Guarantees: an object plays one episode at a time. It is reused if its class allows that and its last call succeeded,
also if the episode was abandoned between two turns. Every other object is closed, after a call that is still running
inside it. At most `max_episodes` episodes run at once.

A blocking call runs on a daemon thread. If its caller goes away, an exception is raised inside the call, which stops
Python code. Code that still hangs then, in a system call or in C, keeps its thread until the process ends, but takes no
other call's turn. Such code, and code that starts processes, belongs in worker processes. `SystemExit` and
`KeyboardInterrupt` of an environment end its episode and nothing else.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from headway.environments.environment_output import OutputCounter, discard_output
from headway.environments.text_environment import EnvironmentTraits, Reply, TextEnvironment, check_reply, read_traits
from headway.errors import EnvironmentFailed
from headway.processes.loop_thread import LoopThread, UnusualExit, settle_future
from headway.processes.stack_dumps import describe_thread

_MAX_THREADS = 64
_RELEASE_TIMEOUT_S = 0.5
"""How long an abandoned call may take to stop."""

MakeEnvironment = Callable[[], TextEnvironment]


def _do_nothing() -> None:
    return None


class LocalEnvironmentHost:
    """Hosts all environments of one kind in this process."""

    def __init__(
        self,
        name: str,
        make: MakeEnvironment,
        *,
        max_episodes: int | None = None,
        loop_thread: LoopThread | None = None,
        after_call: Callable[[], None] = _do_nothing,
    ) -> None:
        """Coroutines run on `loop_thread`, if there is one. `after_call` is called after every call, where it ran."""
        self.name, self.make = name, make
        self.loop_thread, self.after_call = loop_thread, after_call
        self.idle: list[TextEnvironment] = []
        """Reusable objects that wait for their next episode."""
        self.threads = asyncio.Semaphore(_MAX_THREADS)
        """Limits the calls that run at once."""
        self.admission = asyncio.Semaphore(max_episodes or sys.maxsize)

    def make_slot(self) -> LocalEpisodeSlot:
        """Return a slot for one episode."""
        return LocalEpisodeSlot(self)

    async def close(self) -> None:
        """Close the objects that wait for another episode."""
        while self.idle:
            await self.close_environment(self.idle.pop())

    async def close_environment(self, environment: TextEnvironment) -> None:
        """Call `close` of an environment, if it has one."""
        close = getattr(environment, "close", None)
        if close is None:
            return
        if inspect.iscoroutinefunction(close):
            await self.call_coroutine(close)
            return
        async with self.threads:
            result = await BlockingCall("close", close).run()
        if inspect.isawaitable(result):
            await result

    async def call_coroutine(self, function: Callable[..., Any], *args: Any) -> Any:
        """Await a coroutine function of an environment. `EnvironmentFailed` stands for what would end a process."""
        try:
            if self.loop_thread is not None:
                return await self.loop_thread.run(function, *args)
            return await function(*args)
        except (SystemExit, KeyboardInterrupt) as error:
            raise EnvironmentFailed(f"{type(error).__name__}: {error}") from error
        except UnusualExit as error:
            raise EnvironmentFailed(str(error)) from error
        finally:
            self.after_call()


class LocalEpisodeSlot:
    """Plays one episode."""

    def __init__(self, host: LocalEnvironmentHost) -> None:
        self._host = host
        self._environment: TextEnvironment | None = None
        self._output = OutputCounter()
        self._traits = EnvironmentTraits()
        self._has_entered = False
        self._is_intact = False
        """Whether the last call succeeded, so that the object may be reused."""
        self._running_call: BlockingCall | None = None

    async def enter(self) -> None:
        await self._host.admission.acquire()
        self._has_entered = True

    async def open(self) -> EnvironmentTraits:
        host = self._host
        self._environment = host.idle.pop() if host.idle else await self._call(host.make)
        assert self._environment is not None
        self._traits = read_traits(self._environment)
        return self._traits

    async def reset(self, seed: int, data: Mapping[str, Any]) -> Reply:
        assert self._environment is not None
        return self._check(await self._call(self._environment.reset, seed, data), started=False)

    async def step(self, action: str) -> Reply:
        assert self._environment is not None
        return self._check(await self._call(self._environment.step, action), started=True)

    def _check(self, value: object, *, started: bool) -> Reply:
        reply = check_reply(value, started=started)
        self._is_intact = True
        return reply

    async def leave(self) -> None:
        try:
            await self._release_environment()
        finally:
            if self._has_entered:
                self._host.admission.release()
            self._has_entered = False

    async def _release_environment(self) -> None:
        environment, self._environment = self._environment, None
        if self._running_call is not None:
            await self._abandon(self._running_call, environment)
        elif environment is not None and self._is_intact and self._traits.reusable:
            self._host.idle.append(environment)
        elif environment is not None:
            with discard_output(self._output):
                await self._host.close_environment(environment)

    async def _abandon(self, call: BlockingCall, environment: TextEnvironment | None) -> None:
        """Stop a running call. Its thread closes the environment itself as soon as the call returns."""
        close: Callable[[], Any] = getattr(environment, "close", _do_nothing)
        is_coroutine = inspect.iscoroutinefunction(close)
        if not await call.abandon(_do_nothing if is_coroutine else close, _RELEASE_TIMEOUT_S):
            raise EnvironmentFailed(
                f"{self._host.name}: a call that does not return still has its thread; play it in worker processes"
            )
        if is_coroutine:
            await self._host.call_coroutine(close)

    async def locate(self) -> str:
        """Return ` in function at file:line` for a call that takes long, or nothing."""
        return self._running_call.describe() if self._running_call is not None else ""

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the environment, on a thread unless it is a coroutine function."""
        self._is_intact = False
        with discard_output(self._output):
            if inspect.iscoroutinefunction(function):
                return await self._host.call_coroutine(function, *args)
            after_call = self._host.after_call
            self._running_call = call = BlockingCall(f"environment {self._host.name}", function, *args, then=after_call)
            try:
                async with self._host.threads:
                    result = await call.run()
            except Exception:
                self._running_call = None
                raise
            self._running_call = None  # stays set after a cancellation: then the thread is still running
            return await result if inspect.isawaitable(result) else result


class BlockingCallAbandoned(BaseException):
    """Raised inside a call that nobody waits for any more."""


class BlockingCall:
    """Runs one function on one thread."""

    def __init__(
        self, name: str, function: Callable[..., Any], *args: Any, then: Callable[[], None] = _do_nothing
    ) -> None:
        self._function, self._args, self._then = function, args, then
        self._context = contextvars.copy_context()
        self._thread = threading.Thread(target=self._run_on_thread, name=name, daemon=True)
        self._lock = threading.Lock()
        self._is_over = False
        self._afterwards: Callable[[], None] = _do_nothing
        self._loop = asyncio.get_running_loop()
        self._result: asyncio.Future[Any] = self._loop.create_future()
        self._ended = asyncio.Event()

    async def run(self) -> Any:
        """Start the thread and return the result of the function."""
        self._thread.start()
        return await self._result

    def describe(self) -> str:
        """Return ` in function at file:line` for where the function is now."""
        return describe_thread(self._thread.ident)

    async def abandon(self, afterwards: Callable[[], None], within_s: float) -> bool:
        """Stop the function if possible, then call `afterwards`; return whether both were done in time.

        Otherwise the thread calls `afterwards` when the function returns, if it ever does.
        """
        with self._lock:
            is_running = not self._is_over and self._thread.ident is not None
            if is_running:
                self._afterwards = afterwards
                thread_id, exception = ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(BlockingCallAbandoned)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, exception)
        if not is_running:
            await asyncio.to_thread(afterwards)
            return True
        try:
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _run_on_thread(self) -> None:
        with suppress(BaseException):  # an exception raised from outside may arrive a moment too late
            self._call_function()
        with self._lock:
            self._is_over = True
        with suppress(BaseException):
            self._afterwards()
        self._notify_loop(self._ended.set)

    def _call_function(self) -> None:
        result, error = None, None
        try:
            result = self._context.run(self._function, *self._args)
        except BaseException as raised:
            # a future may not carry StopIteration, and SystemExit would end the loop's thread
            is_ordinary = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if is_ordinary else EnvironmentFailed(f"{type(raised).__name__}: {raised}")
        self._then()
        self._notify_loop(settle_future, self._result, result, error)

    def _notify_loop(self, function: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop has closed, so nobody waits
            self._loop.call_soon_threadsafe(function, *args)
