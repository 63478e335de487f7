"""Environments played in this process: coroutines as they are, other code on threads.

Guarantees: an object plays one episode at a time; it serves again if its class says that it can and its last call ended
well, also where the episode was given up between two turns; every other one is closed, after the call that is still
inside it. At most `places` episodes at once. What cannot be guaranteed here: that code which hangs in a system call
ever ends, and that processes which an environment starts die with a killed run. Such code goes into workers.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from headway.environments.blocking_calls import BlockingCall, BlockingCallRunner
from headway.environments.environment_output import OutputCounter, discard_output
from headway.environments.text_environment import (
    EnvironmentTraits,
    Reply,
    TextEnvironment,
    check_reply,
    read_traits,
)
from headway.errors import EnvironmentFailed

_RELEASE_TIMEOUT_S = 0.5
"""How long a call may take to notice that it was abandoned."""

MakeEnvironment = Callable[[], TextEnvironment]


class LocalEnvironmentHost:
    """All environments of one kind in this process."""

    def __init__(self, name: str, make: MakeEnvironment, *, places: int | None = None) -> None:
        self.name, self.make = name, make
        self.idle: list[TextEnvironment] = []
        self.calls = BlockingCallRunner()
        self.places = None if places is None else asyncio.Semaphore(places)

    def seat(self) -> LocalEpisodeSlot:
        """A place to play one episode."""
        return LocalEpisodeSlot(self)

    async def close(self) -> None:
        """Let go of the objects that wait for another episode."""
        while self.idle:
            await _close_environment(self.idle.pop(), self.calls)


class LocalEpisodeSlot:
    """One episode."""

    def __init__(self, host: LocalEnvironmentHost) -> None:
        self._host = host
        self._environment: TextEnvironment | None = None
        self._printed = OutputCounter()
        self._traits = EnvironmentTraits()
        self._inside = self._sound = False
        self._call: BlockingCall | None = None
        """The thread at work, while one is."""

    async def enter(self) -> None:
        if self._host.places is not None:
            await self._host.places.acquire()
        self._inside = True

    async def open(self) -> EnvironmentTraits:
        host = self._host
        self._environment = host.idle.pop() if host.idle else await self._called(host.make)
        assert self._environment is not None
        self._traits = read_traits(self._environment)
        return self._traits

    async def reset(self, seed: int, data: Mapping[str, Any]) -> Reply:
        assert self._environment is not None
        return self._noted(check_reply(await self._called(self._environment.reset, seed, data), started=False))

    async def step(self, action: str) -> Reply:
        assert self._environment is not None
        return self._noted(check_reply(await self._called(self._environment.step, action), started=True))

    async def leave(self) -> None:
        try:
            await self._let_go()
        finally:
            if self._inside and self._host.places is not None:
                self._host.places.release()
            self._inside = False

    async def _let_go(self) -> None:
        environment, self._environment = self._environment, None
        if self._call is not None:
            await self._abandon(self._call, environment)
        elif environment is not None and self._sound and self._traits.reusable:
            self._host.idle.append(environment)
        elif environment is not None:
            with discard_output(self._printed):
                await _close_environment(environment, self._host.calls)

    async def _abandon(self, call: BlockingCall, environment: TextEnvironment | None) -> None:
        """Its thread is still inside, and closes the environment itself once it comes back."""
        close: Callable[[], Any] = getattr(environment, "close", _do_nothing)
        later = inspect.iscoroutinefunction(close)
        if not await call.abandon(_do_nothing if later else close, _RELEASE_TIMEOUT_S):
            raise EnvironmentFailed(
                f"{self._host.name}: a call that does not return still has its thread; play it in worker processes"
            )
        if later:
            await close()

    def _noted(self, reply: Reply) -> Reply:
        self._sound = True
        return reply

    async def _called(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result, wherever it has to run. While it runs, the environment is its own."""
        self._sound = False
        with discard_output(self._printed):
            if inspect.iscoroutinefunction(function):
                return await function(*args)
            self._call = call = BlockingCall(f"environment {self._host.name}", function, *args)
            try:
                result = await self._host.calls.run(call)
            except Exception:
                self._call = None
                raise
            self._call = None
            return await result if inspect.isawaitable(result) else result


def _do_nothing() -> None:
    return None


async def _close_environment(environment: TextEnvironment, calls: BlockingCallRunner) -> None:
    close = getattr(environment, "close", None)
    if close is None:
        return
    if inspect.iscoroutinefunction(close):
        await close()
        return
    result = await calls.run(BlockingCall("close", close))
    if inspect.isawaitable(result):
        await result
