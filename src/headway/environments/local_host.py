"""Runs environments in this process: coroutines on the event loop, other code on threads.

Guarantees: an object plays one episode at a time. It is reused if its class allows that and its last call succeeded,
also if the episode was abandoned between two turns. Every other object is closed, after a call that is still running
inside it. At most `max_episodes` episodes run at once. Not guaranteed: that code which hangs in a system call ever
ends, or that processes which an environment starts die with a killed run. Such code belongs in worker processes.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from headway.environments.blocking_calls import BlockingCall, BlockingCallRunner
from headway.environments.environment_output import OutputCounter, discard_output
from headway.environments.text_environment import EnvironmentTraits, Reply, TextEnvironment, check_reply, read_traits
from headway.errors import EnvironmentFailed

_RELEASE_TIMEOUT_S = 0.5
"""How long an abandoned call may take to stop."""

MakeEnvironment = Callable[[], TextEnvironment]


class LocalEnvironmentHost:
    """Hosts all environments of one kind in this process."""

    def __init__(self, name: str, make: MakeEnvironment, *, max_episodes: int | None = None) -> None:
        self.name, self.make = name, make
        self.idle: list[TextEnvironment] = []
        """Reusable objects that wait for their next episode."""
        self.call_runner = BlockingCallRunner()
        self.admission = None if max_episodes is None else asyncio.Semaphore(max_episodes)

    def make_slot(self) -> LocalEpisodeSlot:
        """Return a slot for one episode."""
        return LocalEpisodeSlot(self)

    async def close(self) -> None:
        """Close the objects that wait for another episode."""
        while self.idle:
            await _close_environment(self.idle.pop(), self.call_runner)


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
        if self._host.admission is not None:
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
        reply = check_reply(await self._call(self._environment.reset, seed, data), started=False)
        self._is_intact = True
        return reply

    async def step(self, action: str) -> Reply:
        assert self._environment is not None
        reply = check_reply(await self._call(self._environment.step, action), started=True)
        self._is_intact = True
        return reply

    async def leave(self) -> None:
        try:
            await self._release_environment()
        finally:
            if self._has_entered and self._host.admission is not None:
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
                await _close_environment(environment, self._host.call_runner)

    async def _abandon(self, call: BlockingCall, environment: TextEnvironment | None) -> None:
        """Stop a running call. Its thread closes the environment itself as soon as the call returns."""
        close: Callable[[], Any] = getattr(environment, "close", _do_nothing)
        is_coroutine = inspect.iscoroutinefunction(close)
        if not await call.abandon(_do_nothing if is_coroutine else close, _RELEASE_TIMEOUT_S):
            raise EnvironmentFailed(
                f"{self._host.name}: a call that does not return still has its thread; play it in worker processes"
            )
        if is_coroutine:
            await close()

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the environment, on a thread unless it is a coroutine function."""
        self._is_intact = False
        with discard_output(self._output):
            if inspect.iscoroutinefunction(function):
                return await function(*args)
            self._running_call = call = BlockingCall(f"environment {self._host.name}", function, *args)
            try:
                result = await self._host.call_runner.run(call)
            except Exception:
                self._running_call = None
                raise
            self._running_call = None  # stays set after a cancellation: then the thread is still running
            return await result if inspect.isawaitable(result) else result


def _do_nothing() -> None:
    return None


async def _close_environment(environment: TextEnvironment, call_runner: BlockingCallRunner) -> None:
    close = getattr(environment, "close", None)
    if close is None:
        return
    if inspect.iscoroutinefunction(close):
        await close()
        return
    result = await call_runner.run(BlockingCall("close", close))
    if inspect.isawaitable(result):
        await result
